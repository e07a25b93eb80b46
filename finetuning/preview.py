"""Show what is trained on: trained and untrained tokens told apart, and the lengths, on a terminal or as a page."""

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetuning.tokens import Encoded

GREEN, PLAIN = "\033[32m", "\033[0m"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Training data</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 1rem; border-radius: .4rem; }}
mark {{ background: #c9efcf; }} mark.other {{ background: #fbd9b5; }}
.side {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 0 2rem; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .15rem 1.5rem .15rem 0; text-align: right; }}
td:first-child, th:first-child, .text td {{ text-align: left; vertical-align: top; }}
.bars {{ width: 100%; }} .bars td {{ padding-right: .6rem; white-space: nowrap; }}
.bars td:last-child {{ width: 99%; text-align: left; }}
.bar {{ display: inline-block; height: .8rem; background: #6b8fb3; vertical-align: middle; }}
.long {{ background: #e09a4f; }}
</style><h1>Training data</h1>{body}</html>
"""
SPLITS = {"train": "train", "test": "test (chooses the checkpoint)", "gate": "gate (judges the model)"}
LENGTHS = {"p50": "median", "p95": "95 %", "p99": "99 %", "max": "longest"}
Part = tuple[bool, str]
"""Whether it is trained, and its text."""


def parts(tokenizer: "PreTrainedTokenizerBase", encoded: "Encoded") -> list[Part]:
    pairs = zip(encoded.labels, encoded.input_ids, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[0] >= 0)
    return [(trained, tokenizer.decode([token for _, token in run])) for trained, run in runs]


def as_terminal(tokenizer: "PreTrainedTokenizerBase", encoded: "Encoded") -> str:
    """What is trained in green."""
    return "".join(f"{GREEN}{text}{PLAIN}" if trained else text for trained, text in parts(tokenizer, encoded))


def page(report: dict[str, Any], previews: list[list[Part]]) -> str:
    """The report and the first conversations as one HTML page that needs nothing else."""
    splits = {name: report[name] for name in SPLITS if name in report}
    bars = "".join(f"<div>{_histogram(name, counts, report['max_length'])}</div>" for name, counts in splits.items())
    shown = "".join(f"<pre>{''.join(map(_marked, preview))}</pre>" for preview in previews)
    differences = (counts["first_difference"] for counts in splits.values())
    return PAGE.format(
        body=f"{_facts(splits)}{_dropped(splits)}<h2>Tokens a conversation</h2>"
        f"<p>training.max_length is {report['max_length']:,}; orange: where conversations are longer.</p>"
        f'<div class="side">{bars}</div>{_difference(next(filter(None, differences), None))}'
        f"<h2>The first conversations to train on; <mark>marked</mark>: what is trained</h2>{shown}"
    )


def _marked(part: Part) -> str:
    trained, text = part
    return f"<mark>{escape(text)}</mark>" if trained else escape(text)


def _row(cells: Iterable[str], tag: str = "td") -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _facts(splits: dict[str, dict[str, Any]]) -> str:
    columns = [_split_facts(counts) for counts in splits.values()]
    rows = "".join(_row([name, *(column[name] for column in columns)]) for name in columns[0])
    return f"<table>{_row(['', *(SPLITS[name] for name in splits)], 'th')}{rows}</table>"


def _split_facts(counts: dict[str, Any]) -> dict[str, str]:
    tokens = counts["tokens"]
    numbers = {
        "conversations": counts["rows"],
        "of these cut": counts["truncated_rows"],
        "turns": counts["turns"],
        "tokens": tokens["read"],
        "of these cut or dropped": tokens["cut"] + tokens["dropped"],
        "of these trained": tokens["trained"],
    }
    lengths = {f"tokens a conversation, {name}": tokens[key] for key, name in LENGTHS.items()}
    return {
        **{name: f"{number:,}" for name, number in numbers.items()},
        "trained, of the tokens that are kept": f"{counts['trainable_share']:.1%}",
        **{name: f"{number:,}" for name, number in lengths.items()},
    }


def _dropped(splits: dict[str, dict[str, Any]]) -> str:
    rows = "".join(
        _row([f"{name}: {count:,} {reason}", f"the first: {counts['first_bad'][reason]}"])
        for name, counts in splits.items()
        for reason, count in counts["dropped"].items()
    )
    return rows and f'<h2>Dropped</h2><table class="text">{rows}</table>'


def _histogram(name: str, counts: dict[str, Any], max_length: int) -> str:
    most = max((count for _, count in counts["histogram"]), default=1)
    bars = "".join(
        f'<tr><td>up to {bound:,}</td><td>{count:,}</td><td><span class="bar{" long" * (bound > max_length)}" '
        f'style="width: {100 * count / most:.1f}%"></span></td></tr>'
        for bound, count in counts["histogram"]
    )
    return f'<h3>{escape(SPLITS[name])}</h3><table class="bars">{bars}</table>'


def _difference(found: dict[str, str] | None) -> str:
    """Side by side, what stands before a turn when it is trained and when it is served."""
    if not found:
        return ""
    common = escape(found["common"])
    sides = "".join(
        f'<div><h3>as {side}</h3><pre>{common}<mark class="other">{escape(found[side])}</mark></pre></div>'
        for side in ("trained", "served")
    )
    return (
        "<h2>The first turn that is trained after other text than it is served after</h2>"
        f'<p>{escape(found["where"])}</p><div class="side">{sides}</div>'
    )
