"""Show what is trained on: trained and untrained tokens told apart, and the lengths, on a terminal or as a page."""

from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetuning.tokens import Encoded

GREEN, PLAIN = "\033[32m", "\033[0m"
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Training data</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4; padding: 1rem; border-radius: .4rem; }}
mark {{ background: #c9efcf; }}
table {{ border-collapse: collapse; }} td, th {{ padding: .15rem .8rem .15rem 0; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
.bar {{ display: inline-block; height: .8rem; background: #6b8fb3; vertical-align: middle; }}
</style><h1>Training data</h1>{body}</html>
"""
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
    body = "".join(_split(name, counts) for name, counts in report.items() if isinstance(counts, dict))
    shown = "".join(f"<pre>{''.join(map(_marked, preview))}</pre>" for preview in previews)
    return PAGE.format(body=f"{body}<h2>The first conversations, what is trained marked</h2>{shown}")


def _marked(part: Part) -> str:
    trained, text = part
    return f"<mark>{escape(text)}</mark>" if trained else escape(text)


def _split(name: str, counts: dict[str, Any]) -> str:
    tokens = counts["tokens"]
    facts = {
        "conversations": counts["rows"],
        "turns": counts["turns"],
        "tokens": tokens["read"],
        "tokens cut": tokens["cut"],
        "conversations cut": counts["truncated_rows"],
        "tokens trained": f"{tokens['trained']} ({counts['trainable_share']:.1%})",
        **{
            f"dropped, {reason}": f"{count}; {counts['first_bad'][reason]}"
            for reason, count in counts["dropped"].items()
        },
    }
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in facts.items())
    most = max((count for _, count in counts["histogram"]), default=1)
    bars = "".join(
        f'<tr><td>up to {bound}</td><td>{count}</td><td style="text-align: left"><span class="bar" '
        f'style="width: {30 * count / most:.1f}rem"></span></td></tr>'
        for bound, count in counts["histogram"]
    )
    lengths = f"<h3>Tokens a conversation</h3><table>{bars}</table>"
    return f"<h2>{escape(name)}</h2><table>{rows}</table>{lengths}"
