"""What the report of a finished run says, section by section, as markdown."""

from config.settings import Settings, shown
from finetuning import links
from finetuning.evaluate import CANDIDATE, CHAMPION
from finetuning.markdown import code, facts, fence, link, table, text
from finetuning.report import Job
from finetuning.report_account import data, money, time_spent, training
from finetuning.reproduce import again

LONGEST_ANSWER = 500
"""Characters shown of a question or an answer."""
METRICS = {
    "loss": ("Loss, nats a trained token", "{:.4g}"),
    "num_rows": ("Conversations it was measured on", "{}"),
    "exact_match": ("Questions answered exactly", "{:.0%}"),
    "stopped": ("Answers that end by themselves", "{:.0%}"),
}


def write(job: Job, picture: str) -> str:
    """Sections by blank lines; the first line holds the verdict."""
    sections = [
        f"# {text(f'{job.outcome}: {job.name} version {job.number}')}",
        text(job.reason),
        origin(job),
        *("## Is it better?", comparison(job)),
        *("## Training", f"![Loss by optimizer step]({picture})", training(job)),
        *("## Where the time and the money went", time_spent(job), money(job)),
        *("## Data", data(job)),
        samples(job),
        *("## Serve it", serving(job)),
        *("## Make it again", again(job)),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def origin(job: Job) -> str:
    how = "registered by this run" if job.created else "registered by an earlier run"
    state = job.training_state()
    run_id = state.get("mlflow_run_id")
    run = link(run_id, links.run_url(run_id, state.get("mlflow_experiment_id"))) if run_id else "not made yet"
    return facts(
        {
            "Version": f"{link(f'{job.name} {job.number}', links.version_url(job.name, job.number))}, {how}",
            "Alias": code("champion" if job.outcome == "champion" else "challenger"),
            "Base model": f"{text(job.model.name)} at {code(job.model.version)}",
            "Data": f"{text(shown(job.dataset.name))} at {code(job.dataset.version)}",
            "Recipe": text(job.recipe or "defaults"),
            "Model directory": code(job.published),
            "MLflow run": f"{run} at {code(shown(Settings().tracking_uri))}",
            "Flow run": link(job.flow_run_name, job.flow_run_url),
        }
    )


def comparison(job: Job) -> str:
    models, scores = job.models(), job.evaluation.scores
    if CANDIDATE not in models:
        return "Nothing was measured: the recipe asks for nothing, or no held-out row is left for it."
    rows = [
        [label, *("not measured" if (value := scores[key][name]) is None else form.format(value) for key in models)]
        for name, (label, form) in METRICS.items()
    ]
    alone = "There was no champion to compare it with." if CHAMPION not in models else None
    told = job.evaluation.problem or alone
    return "\n\n".join([table(["", *map(text, models.values())], rows), *([text(told)] if told else [])])


def samples(job: Job) -> str:
    """The first held-out questions, all answers to one together. No table: Prefect's UI breaks no line in a cell."""
    answers, names = job.answers(), job.models()
    if not answers.get(CANDIDATE):
        return ""
    told = ["## Answers to held-out questions"]
    for number, each in enumerate(zip(*answers.values(), strict=True), 1):
        lines = {"reference": each[0]["reference"]}
        lines |= {names[key]: one["answer"] for key, one in zip(answers, each, strict=True)}
        told.append(f"**{number}.** {text(each[0]['question'], LONGEST_ANSWER)}")
        told.append("\n".join(f"- *{text(name)}*: {text(answer, LONGEST_ANSWER)}" for name, answer in lines.items()))
    return "\n\n".join(told)


def serving(job: Job) -> str:
    """See docs/serving.md."""
    settings = Settings()
    uri = f"models:/{job.name}/{job.number}"
    servers = f"export MLFLOW_TRACKING_URI={shown(settings.tracking_uri)}"
    servers += f" MLFLOW_REGISTRY_URI={shown(settings.registry_uri)}"
    quick = f"mlflow models serve -m {uri} --env-manager local --host 127.0.0.1 --port 5001"
    vllm = f"python -m finetuning.serving vllm {uri} --output vllm.yaml\nvllm serve --config vllm.yaml"
    endpoint = f"python -m finetuning.serving databricks {uri}"
    told = ["A quick look, with MLflow's own server:", fence(f"{servers}\n{quick}"), "For traffic, with vLLM:"]
    told.append(fence(vllm))
    if settings.registry_uri.startswith("databricks-uc"):
        told += ["Databricks Model Serving:", fence(endpoint)]
    return "\n\n".join([*told, "More: `docs/serving.md`."])
