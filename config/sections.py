"""The flow's parameters, one section a concern. The defaults are the recommended recipe, `qwen3-4b`.

The names in `TrainingSection` are `trl.SFTConfig`'s own, so a section maps straight onto it. What stands under a
field is its help in the Prefect form and on the command line.
"""

import warnings
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

# `schema` is the word Unity Catalog uses; it hides a deprecated method of pydantic's BaseModel that nothing here calls.
warnings.filterwarnings("ignore", message='Field name "schema" in "RegistrySection" shadows an attribute')

STOCHASTIC_ROUNDING_OPTIMIZER, STOCHASTIC_ROUNDING = "adamw_torch_8bit", "bf16_stochastic_round=True"
"""torchao's AdamW, which transformers builds with these arguments; no other of its optimizers rounds like that."""
EIGHT_BIT_OPTIMIZERS = {"adamw_torch_8bit", "adamw_torch_4bit"}
"""torchao's, by transformers' names."""

# Unity Catalog takes more, but MLflow's clients and the file paths of a volume do not agree on it.
NamePart = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$", max_length=255)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,  # 10 as the default of a float is 10.0 when it was stored and read: another fingerprint
    )


class ModelSection(Section):
    """The base model."""

    name: str = Field("Qwen/Qwen3-4B", min_length=1, title="Base model")
    """Hub id, or path of a directory with config, weights and tokenizer."""

    revision: str = Field("main", min_length=1, title="Revision")
    """Branch, tag or commit on the hub; resolved to a commit once a run. Ignored for a path."""

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", title="Attention")
    """How attention is computed. `flash_attention_2` needs the package flash-attn and a GPU."""

    chat_style: Literal["auto", "no_think", "keep"] = Field("auto", title="Chat style")
    """Template to train, save and serve with. `keep`: the tokenizer's own. `no_think`: Qwen3's without think blocks,
    for data without reasoning. `auto`: `no_think` for the hybrid Qwen3 models, otherwise `keep`."""

    chat_template_file: str | None = Field(None, title="Chat template file")
    """Path of a Jinja template to use instead, with `{% generation %}` around what the assistant says."""

    trust_remote_code: bool = Field(False, title="Trust remote code")
    """Run Python code that comes with the model. Off unless the model needs it and you have read that code."""


class DatasetSection(Section):
    """The conversations to train on."""

    name: str = Field("trl-lib/Capybara", min_length=1, title="Dataset")
    """Hub id, or path of a file (.jsonl, .json, .parquet, .csv, .arrow; .gz and .zst as well), of a directory of such
    files, or a pattern such as `data/*.jsonl`."""

    config_name: str | None = Field(None, title="Dataset configuration")
    """Configuration (subset) of a hub dataset, where it has several."""

    revision: str = Field("main", min_length=1, title="Revision")
    """Branch, tag or commit on the hub; resolved to a commit once a run. Ignored for a path."""

    shape: Literal["auto", "messages", "sharegpt", "prompt_completion", "alpaca", "input_output", "text"] = Field(
        "auto", title="Shape of a row"
    )
    """What a row looks like. `auto` tells by its columns; `text`, which uses no chat template, only when asked for."""

    train_split: str = Field("train", min_length=1, title="Training split")
    """Split to train on."""

    test_split: str | None = Field(None, title="Test split")
    """Split to evaluate on. Empty: `test`, else `validation`, else `eval`, else a part of the training split."""

    test_size: float = Field(0.1, gt=0, lt=1, title="Test share")
    """Share of the training split that is set aside when there is no split to evaluate on."""

    split_seed: int = Field(42, ge=0, title="Split seed")
    """Seed of the shuffle that decides which rows are set aside."""

    group_by: str | None = Field(None, title="Group by")
    """Column whose equal values stay on one side when a part is set aside (turns of one customer, say)."""

    min_rows: int = Field(2, ge=1, title="Fewest rows")
    """Fewest rows that the training and the test split must each have."""

    deduplicate: bool = Field(True, title="Remove duplicates")
    """Keep one of rows that are equal, and remove from the training split what the test split has."""

    on_bad_rows: Literal["drop", "fail"] = Field("drop", title="Bad rows")
    """What becomes of rows that cannot be trained on. All are counted and named either way."""

    max_bad_fraction: float = Field(0.02, ge=0, le=1, title="Bad rows at most")
    """Share of rows that may be dropped before it is refused; five are always tolerated."""

    on_unreadable: Literal["fail", "drop"] = Field("fail", title="Unreadable lines")
    """What becomes of lines that are no JSON object or not UTF-8."""

    on_late_system: Literal["keep", "drop"] = Field("keep", title="System message later on")
    """What becomes of a row with a system message that is not the first."""

    on_repeated_role: Literal["merge", "drop"] = Field("merge", title="Same role twice")
    """Two turns of the user in a row, or of the assistant: joined by a blank line, or the row dropped."""

    on_assistant_first: Literal["drop", "keep"] = Field("drop", title="Assistant speaks first")
    """What becomes of a row in which the assistant speaks before the user."""

    on_long_rows: Literal["truncate", "drop", "split_turns", "fail"] = Field("truncate", title="Long rows")
    """What becomes of rows longer than training.max_length: cut, dropped, or split between turns."""


class TrainingSection(Section):
    """How to train. Names and meanings are those of `trl.SFTConfig`."""

    max_steps: int = Field(50, ge=1, title="Optimizer steps")
    """Optimizer steps to train."""

    learning_rate: float = Field(2e-5, gt=0, le=1, title="Learning rate")
    """Highest learning rate."""

    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "cosine_with_min_lr"] = Field(
        "linear", title="Learning-rate schedule"
    )
    """Shape of the learning rate after the warm-up."""

    warmup_steps: float = Field(10, ge=0, title="Warm-up steps")
    """Steps the learning rate rises for; below 1: share of all steps."""

    weight_decay: float = Field(0.01, ge=0, le=1, title="Weight decay")
    """Decoupled weight decay."""

    max_length: int = Field(2048, ge=8, title="Longest sequence")
    """Tokens a conversation is cut to."""

    assistant_only_loss: bool = Field(True, title="Assistant-only loss")
    """Train on the assistant's turns only."""

    packing: bool = Field(False, title="Packing")
    """Put several conversations into one sequence of up to training.max_length tokens; none sees another. A micro-batch
    then has more conversations, and an optimizer step more tokens."""

    padding_free: bool = Field(False, title="No padding")
    """Lay the conversations of a micro-batch end to end instead of padding them to the longest; none sees another. The
    optimizer steps have the conversations that they would have anyway."""

    per_device_train_batch_size: int = Field(1, ge=1, title="Micro-batch size")
    """Conversations (packed: sequences) a device works on at once."""

    gradient_accumulation_steps: int = Field(8, ge=1, title="Gradient accumulation steps")
    """Micro-batches that make one optimizer step."""

    num_processes: int = Field(1, ge=1, title="Processes")
    """Processes that train together, one a GPU, with the weights sharded over them (FSDP2)."""

    precision: Literal["fp32", "bf16_stochastic_rounding", "bf16"] = Field("fp32", title="Precision of the weights")
    """What the weights are held in while training. `fp32`: no update is lost; 16 bytes a parameter.
    `bf16_stochastic_rounding`: small updates survive on average; about 6 bytes. `bf16`: updates below half of the last
    digit are lost, which at small learning rates are most of them; 8 bytes. A learning rate fits one of them."""

    optim: str | None = Field(None, min_length=1, title="Optimizer")
    """Optimizer, by transformers' name for it. Empty: AdamW as the precision needs it, `adamw_torch_fused` or
    `adamw_torch_8bit`."""

    optim_args: str | None = Field(None, title="Optimizer arguments")
    """Further arguments of the optimizer, as `name=value,name=value`."""

    bf16: bool = Field(True, title="bf16 autocast")
    """Compute in bfloat16 where it is safe."""

    activation_checkpointing: bool | Literal["auto"] = Field(True, title="Activation checkpointing")
    """Recompute activations in the backward pass instead of keeping them: less memory, about a third more compute.
    `auto`: only where the memory plan says that they do not fit otherwise."""

    activation_checkpointing_kwargs: dict[str, Any] = Field({"use_reentrant": False}, title="Checkpointing arguments")
    """Arguments of torch's checkpointing."""

    eval_steps: int = Field(25, ge=1, title="Evaluate every")
    """Optimizer steps between two evaluations."""

    eval_max_rows: int | None = Field(256, ge=1, title="Rows to evaluate on at most")
    """Conversations of the test split that choose the checkpoint, the first so many of them. Empty: all."""

    per_device_eval_batch_size: int = Field(1, ge=1, title="Evaluation batch size")
    """Conversations (packed: sequences) a device evaluates at once."""

    save_steps: int = Field(25, ge=1, title="Save every")
    """Optimizer steps between two checkpoints."""

    save_total_limit: int = Field(2, ge=1, title="Checkpoints kept")
    """Checkpoints kept on disk; the best one is always among them."""

    load_best_model_at_end: bool = Field(True, title="Keep the best")
    """Take the checkpoint with the best metric instead of the last one."""

    metric_for_best_model: str = Field("eval_loss", min_length=1, title="Metric of the best")
    """Metric that decides which checkpoint is best."""

    greater_is_better: bool = Field(False, title="Greater is better")
    """Whether a greater value of that metric is better."""

    logging_steps: int = Field(10, ge=1, title="Log every")
    """Optimizer steps between two log lines."""

    dataloader_pin_memory: bool = Field(False, title="Pin memory")
    """Hand batches to the GPU from pinned memory."""

    remove_unused_columns: bool = Field(False, title="Remove unused columns")
    """Drop dataset columns the model does not take."""

    seed: int = Field(42, ge=0, title="Seed")
    """Seed of data order and of everything random in training."""

    @property
    def weight_dtype(self) -> Literal["float32", "bfloat16"]:
        return "float32" if self.precision == "fp32" else "bfloat16"

    @property
    def optimizer(self) -> tuple[str, str | None]:
        """`optim` and `optim_args` that the precision comes to."""
        if self.precision != "bf16_stochastic_rounding":
            return self.optim or "adamw_torch_fused", self.optim_args
        return STOCHASTIC_ROUNDING_OPTIMIZER, ",".join(filter(None, [self.optim_args, STOCHASTIC_ROUNDING]))


class RegistrySection(Section):
    """Where the result goes: `catalog.schema.model_name` in the registry, a folder in `volume` for its files."""

    catalog: NamePart = Field("main", title="Catalog")
    """Unity Catalog catalog."""

    schema: NamePart = Field("default", title="Schema")
    """Schema in the catalog."""

    model_name: NamePart = Field("qwen3_4b_assistant", title="Model name")
    """Name of the registered model in the schema."""

    volume: NamePart = Field("checkpoints", title="Volume")
    """Volume in the schema that finished model directories are copied to."""

    allow_local: bool = Field(False, title="Allow a local registry")
    """Accept a registry that is not Unity Catalog. Off, such a run is refused before it trains."""

    @property
    def registered_model_name(self) -> str:
        return f"{self.catalog}.{self.schema}.{self.model_name}"


class EvaluationSection(Section):
    """What base model, champion and result are put to: rows of the half of the test split that the gate has."""

    loss_rows: int = Field(256, ge=0, title="Rows for the loss")
    """Conversations whose answers' loss is compared. 0: none."""

    sample_rows: int = Field(8, ge=0, title="Answers to show")
    """Conversations whose last question each model answers, to be read side by side."""

    exact_match_rows: int = Field(0, ge=0, title="Answers to compare")
    """Conversations whose last answer is compared with the reference, word for word. 0: none. Meaningful where the
    answers are short and have one right form."""

    max_new_tokens: int = Field(256, ge=1, title="Longest answer")
    """Tokens an answer may have."""

    @property
    def num_questions(self) -> int:
        return max(self.sample_rows, self.exact_match_rows)


class GateSection(Section):
    """When a version becomes the champion that is served. One that does not stays a challenger, with the reason."""

    better_than: Literal["champion", "base", "none"] = Field("champion", title="Better than")
    """What it must be better than: the current champion (the base model while there is none), always the base model, or
    nothing at all."""

    metric: Literal["loss", "exact_match"] = Field("loss", title="Metric")
    """What better means: a lower loss a token, or a greater share of answers that match."""

    min_improvement: float = Field(0.0, ge=0, title="Least improvement")
    """What the improvement must exceed for certain: with the lower end of its 95 % bootstrap interval."""

    max_regression: dict[Literal["loss", "exact_match", "stopped"], float] = Field(
        {"stopped": 0.1}, title="Allowed regressions"
    )
    """Metric -> how much worse than that it may be in it."""

    approval: bool = Field(False, title="Ask a person")
    """Leave the promotion of a version that passes to a person: python -m finetuning.register promote."""

    @property
    def takes_half(self) -> bool:
        """Whether half of the test split is the gate's, and chooses no checkpoint."""
        return self.better_than != "none"


class RunSection(Section):
    """How this run goes about it."""

    refresh: bool = Field(False, title="Do it all again")
    """Use nothing that earlier runs have made: load, train and register again, beside what is there. Off, a run that is
    asked for what an earlier one did has nothing to do."""

    max_late_hours: float | None = Field(12, gt=0, title="Hours late at most")
    """A run that a schedule made is cancelled when it can only start this long after its time, because the worker was
    away or other runs came first. Empty: it starts all the same."""


class Config(Section):
    """All sections of one run."""

    model: ModelSection = ModelSection()
    dataset: DatasetSection = DatasetSection()
    training: TrainingSection = TrainingSection()
    registry: RegistrySection = RegistrySection()
    evaluation: EvaluationSection = EvaluationSection()
    gate: GateSection = GateSection()
    run: RunSection = RunSection()

    # Checks across fields belong here and not into a section: a section may hold the overrides alone, without the
    # deployment's values that they are merged with.
    @model_validator(mode="after")
    def _saves_what_it_evaluates(self) -> Self:
        training = self.training
        if training.load_best_model_at_end and training.save_steps % training.eval_steps:
            raise ValueError(
                f"training.save_steps={training.save_steps} is not a multiple of "
                f"training.eval_steps={training.eval_steps}, so the best checkpoint might never be saved. Set both to "
                "the same value, or training.load_best_model_at_end to false."
            )
        return self

    @model_validator(mode="after")
    def _rounds_with_an_optimizer_that_can(self) -> Self:
        training = self.training
        rounds = training.precision == "bf16_stochastic_rounding"
        if rounds and training.optim not in (None, STOCHASTIC_ROUNDING_OPTIMIZER):
            raise ValueError(
                f"training.precision='bf16_stochastic_rounding' needs training.optim={STOCHASTIC_ROUNDING_OPTIMIZER!r} "
                f"and has {training.optim!r}. Leave training.optim out, or take another precision."
            )
        return self

    @model_validator(mode="after")
    def _trains_with_what_can_be_resumed(self) -> Self:
        """torchao's 8-bit states are no tensors that FSDP2 hands to the other processes when a checkpoint is loaded;
        and transformers passes block_size on as text, which torchao cannot divide by."""
        training, (optim, arguments) = self.training, self.training.optimizer
        if training.num_processes > 1 and optim in EIGHT_BIT_OPTIMIZERS:
            raise ValueError(
                f"training.num_processes={training.num_processes} with the optimizer {optim!r} (training.precision="
                f"{training.precision!r}) could not go on from a checkpoint. Use one process, or another optimizer "
                "with training.precision 'fp32' or 'bf16'."
            )
        if optim in EIGHT_BIT_OPTIMIZERS and "block_size" in (arguments or ""):
            raise ValueError(
                f"training.optim_args={training.optim_args!r}: block_size fails at the first optimizer step. Leave it "
                "out."
            )
        return self

    @model_validator(mode="after")
    def _attends_in_a_dtype_that_can(self) -> Self:
        training, attention = self.training, self.model.attn_implementation
        if attention == "flash_attention_2" and training.precision == "fp32" and not training.bf16:
            raise ValueError(
                "model.attn_implementation='flash_attention_2' has no fp32: set training.bf16 to true, or take 'sdpa'."
            )
        return self

    @model_validator(mode="after")
    def _measures_what_the_gate_asks_for(self) -> Self:
        rows = {"loss": "loss_rows", "exact_match": "exact_match_rows"}[self.gate.metric]
        if self.gate.better_than != "none" and not getattr(self.evaluation, rows):
            raise ValueError(
                f"gate.metric={self.gate.metric!r} needs evaluation.{rows}, which is 0. Set it, or gate.better_than to "
                "'none'."
            )
        return self
