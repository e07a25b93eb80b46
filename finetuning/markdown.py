"""Markdown for people, out of text that nobody vouches for: rows of a dataset, answers of a model, messages of errors.

What goes through `text`, `code` or `fence` is shown as it is, in Prefect's UI and in `page`: none of it becomes markup
or HTML, or a link with another text than its address.
"""

import re
from typing import Any
from urllib.parse import quote

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&!$:.@^])")
"""With a backslash before them they are only characters. Those of an address are among them: Prefect's new UI makes a
link of it all the same, the other one and `page` do not."""
BACKSLASH = r"\\\1"
ADDRESS = "/:?#[]@!$&'()*+,;=%-._~"
"""What may stand in an address as it is."""
LABEL = re.compile(r"([\\`*\[\]<>&|~]|(?<!\w)_|_(?!\w))")
"""As SPECIAL within a link, whose text cannot become another one; Prefect's UI would show the needless ones there."""
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; margin-bottom: .4rem; }}
h2 {{ font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ padding: .25rem .9rem .25rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee; }}
td:first-child {{ min-width: 9rem; }}
thead tr:not(:has(th:not(:empty))) {{ display: none; }}
pre, code {{ font: 13px/1.5 ui-monospace, monospace; background: #f6f6f4; border-radius: .3rem; }}
pre {{ padding: .8rem 1rem; white-space: pre-wrap; }}
code {{ padding: .1rem .25rem; }} pre code {{ padding: 0; }}
img {{ max-width: 100%; }}
</style></head><body>
{body}</body></html>
"""


def text(value: Any, longest: int | None = None) -> str:
    """`value` in one line, cut after `longest` characters."""
    line = " ↵ ".join(str(value).splitlines())
    if longest and len(line) > longest:
        line = f"{line[:longest]} …"
    return SPECIAL.sub(BACKSLASH, line)


def code(value: Any) -> str:
    """A path or a command within a line."""
    line = str(value)
    return text(line) if re.search(r"[`|\n\r]", line) or not line.strip() else f"`{line}`"


def fence(lines: str) -> str:
    """A block of text as it is, with room around it."""
    longest = max((len(run) for run in re.findall(r"`+", lines)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}text\n{lines}\n{marks}"


def link(label: Any, url: str | None) -> str:
    """The label alone where there is nothing to link to."""
    if not url:
        return text(label)
    return f"[{LABEL.sub(BACKSLASH, ' '.join(str(label).split()))}](<{quote(url, safe=ADDRESS)}>)"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Cells are markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def facts(values: dict[str, str | None]) -> str:
    """Name and value a row, without those that have none."""
    return table(["", ""], [[text(name), value] for name, value in values.items() if value])


def duration(seconds: float) -> str:
    """Two units at most: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if round(seconds) < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def page(title: str, markdown: str) -> str:
    """The same as a page of HTML that needs nothing else and loads nothing."""
    from html import escape

    from markdown_it import MarkdownIt

    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    return PAGE.format(title=escape(title), body=renderer.render(markdown))
