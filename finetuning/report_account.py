"""Sections of the report that account for something: rows and tokens, steps, seconds, money."""

from config.settings import Settings
from finetuning.markdown import code, duration, facts, table, text
from finetuning.report import Job


def training(job: Job) -> str:
    result, options = job.training_state().get("result") or {}, job.config.training
    loss = result.get("eval_loss")
    return facts(
        {
            "Steps, tokens": f"{result['num_steps']}, {result['num_tokens']:,}",
            "Checkpoint": f"{code(result['checkpoint'])}"
            + (f", held-out loss {loss:.4g} at best" if loss is not None else ""),
            "Learning rate, seed": f"{options.learning_rate:g}, {options.seed}",
            "Length, precision": f"{options.max_length} tokens, {text(options.precision)}",
            "Peak memory": f"{result['peak_memory_gib']:.2f} GiB" if result.get("peak_memory_gib") else None,
        }
    )


def time_spent(job: Job) -> str:
    spent = sum(step.seconds for step in job.steps)
    rows = [[text(step.name), duration(step.seconds), remark(step.state)] for step in job.steps]
    rows.append(["all of the run", duration(job.total_seconds), ""])
    told = [table(["step", "time", ""], rows)]
    result = job.training_state().get("result") or {}
    if shares := result.get("time_shares"):
        words = (f"{share:.0%} {phase.replace('_', ' and ')}" for phase, share in shares.items() if share >= 0.005)
        took = f"The training loop took {duration(result['train_seconds'])} when it ran to its end"
        told.append(text(f"{took}: {', '.join(words)}."))
    if job.total_seconds > spent + 60:
        told.append(f"{duration(job.total_seconds - spent)} were between the steps: starts, waiting, earlier tries.")
    return "\n\n".join(told)


def remark(state: str) -> str:
    return "" if state in ("Completed", "Running") else text(state.lower())


def money(job: Job) -> str:
    """Of the whole run: its GPUs wait while a step needs none."""
    result, price = job.training_state().get("result") or {}, Settings().gpu_hour_price
    gpus = result.get("num_gpus") or 0
    if not gpus:
        return "No GPU was used."
    hours = gpus * job.total_seconds / 3600
    trained = gpus * result["train_seconds"] / 3600
    held = f"{hours:.2f} GPU hours were held by this run; {trained:.2f} of a training are in its loop."
    if price is None:
        return f"{held} Set `FINETUNE_GPU_HOUR_PRICE` to see what they cost."
    return f"{held} At {price:g} an hour that is **{hours * price:.2f}**."


def data(job: Job) -> str:
    report = job.tokens_report()
    splits = {name: counts for name, counts in report.items() if isinstance(counts, dict)}
    reasons = dict.fromkeys(reason for counts in splits.values() for reason in counts["dropped"])
    count = {
        "conversations": lambda counts: counts["rows"],
        **{f"dropped: {reason}": lambda counts, reason=reason: counts["dropped"].get(reason, 0) for reason in reasons},
        f"cut at {report['max_length']} tokens": lambda counts: counts["truncated_rows"],
        "tokens of half of them, at most": lambda counts: counts["tokens"]["p50"],
        "tokens of 99 % of them, at most": lambda counts: counts["tokens"]["p99"],
        "tokens": lambda counts: counts["tokens"]["read"],
        "tokens cut": lambda counts: counts["tokens"]["cut"],
        "tokens trained on": lambda counts: counts["tokens"]["trained"],
    }
    rows = [[text(name), *(f"{number(counts):,}" for counts in splits.values())] for name, number in count.items()]
    told = [table(["", *map(text, splits)], rows), "`test` chose the checkpoint, `gate` compared the models."]
    first = [
        f"- the first {text(reason)} of {text(split)}: {text(where, 200)}"
        for split, counts in splits.items()
        for reason, where in counts["first_bad"].items()
    ]
    return "\n\n".join([*told, *(["\n".join(first)] if first else [])])
