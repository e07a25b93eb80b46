"""What `bench.gpu` says of its rows."""

from typing import Any

from finetuning.memory.gpus import named_peak

HEADS = "row tokens/s MFU_% s/step planned measured error_% reserved".split()


def summary(result: dict[str, Any], gpu: str | None) -> dict[str, Any]:
    """What the numbers of a training come to."""
    seconds = sum(result["step_seconds"])
    most = named_peak(gpu or "")
    peak, plan, evaluation = result["peak"], result["planned"], result["evaluation_tokens_per_second"]
    notes = [result["head"], f"loss {result['losses'][0]:.3f} to {result['losses'][-1]:.3f}"]
    notes += [f"evaluation {evaluation:,.0f} tokens/s"] if evaluation else []
    notes += [result["plan"]] if result["plan"] else []
    return {
        "status": "done",
        "note": ", ".join(notes),
        "tokens_per_second": result["tokens"] / seconds,
        "mfu": result["flops"] / seconds / most if most else None,
        "seconds_per_step": seconds / len(result["step_seconds"]),
        "plan_error": plan / peak - 1 if plan and peak else None,
    }


def table(results: list[dict[str, Any]]) -> str:
    """One line a row; what is not known is a dash."""
    lines = [[*HEADS, "outcome"], *map(_cells, results)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADS))]
    widths[0] = -widths[0]  # to the left
    return "\n".join("  ".join(map(_padded, line, [*widths, 0])) for line in lines)


def _padded(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def _cells(result: dict[str, Any]) -> list[str]:
    def cell(name: str, factor: float, form: str) -> str:
        value = result.get(name)
        return "-" if value is None else format(value * factor, form)

    return [
        result["name"],
        cell("tokens_per_second", 1, ",.0f"),
        cell("mfu", 100, ".1f"),
        cell("seconds_per_step", 1, ".2f"),
        cell("planned", 1e-9, ".2f"),
        cell("peak", 1e-9, ".2f"),
        cell("plan_error", 100, "+.1f"),
        cell("reserved", 1e-9, ".2f"),
        f"{result['status']}: {result['note']}",
    ]
