"""The notebook that the pipeline began as, as a script, for `bench.training`: `python -m bench.training_seed JOB.json`.

Its values, its order of things; what differs is named in the job: dtype of the weights, rows to evaluate on. What the
libraries of today need beyond it: a device, requirements for `log_model`.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from finetuning.chat import CHATML_TEMPLATE
from finetuning.speed import Speed


def main(job: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    import mlflow
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTTrainer

    folder = Path(job["folder"])
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment(experiment_id=mlflow.create_experiment("notebook", (folder / "artifacts").as_uri()))
    splits = load_dataset("json", data_dir=job["data"]).select_columns("messages")
    if job["eval_rows"]:
        splits["test"] = splits["test"].select(range(min(job["eval_rows"], len(splits["test"]))))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokenizer.chat_template = tokenizer.chat_template or CHATML_TEMPLATE
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=job["dtype"])
    speed = Speed(0.0)
    with mlflow.start_run(run_name="full-fine-tuning", log_system_metrics=True):
        trainer = SFTTrainer(
            model=model, args=arguments(job), processing_class=tokenizer, callbacks=[speed],
            train_dataset=splits["train"], eval_dataset=splits["test"],
        )  # fmt: skip
        trainer.train()
        output = folder / "model"
        trainer.save_model(str(output))
        tokenizer.save_pretrained(output)
        register(trainer.model, tokenizer)
    return {
        "seconds": time.monotonic() - started,
        "train_seconds": sum(speed.seconds.values()),
        "shares": speed.summary()["time_shares"],
        "tokens": trainer.state.num_input_tokens_seen,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "model": str(output),
    }


def arguments(job: dict[str, Any]) -> Any:
    import torch
    from trl import SFTConfig

    return SFTConfig(
        use_cpu=not torch.cuda.is_available(),
        output_dir=f"{job['folder']}/checkpoints",
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        gradient_accumulation_steps=8,
        learning_rate=job["learning_rate"],
        max_steps=job["steps"],
        eval_steps=job["steps"] // 2,
        save_steps=job["steps"] // 2,
        logging_steps=10,
        save_total_limit=2,
        report_to="mlflow",
        warmup_steps=10,
        weight_decay=0.01,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        eval_strategy="steps",
        save_strategy="steps",
        load_best_model_at_end=True,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        include_num_input_tokens_seen="non_padding",
        disable_tqdm=True,
    )


def register(model: Any, tokenizer: Any) -> None:
    import mlflow

    mlflow.transformers.log_model(
        transformers_model={"model": model, "tokenizer": tokenizer},
        name="model",
        task="llm/v1/chat",
        pip_requirements=["torch", "transformers"],
        registered_model_name="main.default.seed",
    )


if __name__ == "__main__":
    job_file = Path(sys.argv[1])
    result = main(json.loads(job_file.read_text()))
    job_file.with_name("result.json").write_text(json.dumps(result))
