"""The flow `finetune`: fine-tune a chat model and register it.

By hand: `python -m flows.finetune DEPLOYMENT --section.name value ...`; see README.md for Prefect.
"""

from prefect import flow
from prefect.states import Cancelled, Completed, State

from config.sections import (
    DatasetSection,
    EvaluationSection,
    GateSection,
    ModelSection,
    RegistrySection,
    RunSection,
    TrainingSection,
)
from tasks.checkpoint import publish, save_checkpoint
from tasks.configuration import resolve_configuration
from tasks.data import load_and_split
from tasks.evaluation import evaluate
from tasks.hooks import tell_cancellation, tell_failure
from tasks.model import prepare_model
from tasks.outcome import find_outcome, nothing_to_do, remember_outcome
from tasks.preflight import preflight
from tasks.promotion import prove_and_promote
from tasks.registration import register
from tasks.report import report, summary
from tasks.schedule import too_late
from tasks.tokens import tokenize
from tasks.training import train


@flow(name="finetune", on_failure=[tell_failure], on_cancellation=[tell_cancellation])
def finetune(
    model: ModelSection = ModelSection(),
    dataset: DatasetSection = DatasetSection(),
    training: TrainingSection = TrainingSection(),
    registry: RegistrySection = RegistrySection(),
    evaluation: EvaluationSection = EvaluationSection(),
    gate: GateSection = GateSection(),
    run: RunSection = RunSection(),
) -> State:
    """Fine-tune a chat model on conversations, register it as a new model version, promote it when it is better."""
    given = dict(
        model=model, dataset=dataset, training=training, registry=registry, evaluation=evaluation, gate=gate, run=run
    )
    resolved = resolve_configuration({name: section.model_dump(exclude_unset=True) for name, section in given.items()})
    config = resolved.config
    if late := too_late(config):
        return Cancelled(message=late)

    inputs = preflight(config)
    if earlier := find_outcome(config, inputs):
        return Completed(message=nothing_to_do(earlier))
    data = load_and_split(config.dataset, inputs.dataset)
    base = prepare_model(config.model, inputs.model)
    tokens = tokenize(config, data, base)
    trained = train(resolved, data, base, tokens)
    model_directory = save_checkpoint(resolved, inputs, base, trained)
    found = evaluate(config, data, base, model_directory)
    published = publish(resolved, model_directory, found)
    version = register(config, model_directory)
    verdict = prove_and_promote(config, data, base, trained, model_directory, found, version)
    report(resolved, inputs, tokens, trained, model_directory, published, found, version, verdict)
    remember_outcome(config, inputs, trained, published, version, verdict)
    return Completed(message=summary(config, trained, published, found, version, verdict))


if __name__ == "__main__":
    from flows.local import main

    main(finetune)
