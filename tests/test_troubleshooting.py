"""What docs/troubleshooting.md must have."""

import re
from typing import get_args

from finetuning.errors import Kind
from tests.conftest import PROJECT


def test_every_kind_of_failure_has_a_section() -> None:
    text = (PROJECT / "docs" / "troubleshooting.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n\n(.+?)(?=^##)", text, flags=re.MULTILINE | re.DOTALL))
    assert list(sections) == list(get_args(Kind))
    assert all(len(section.split()) > 10 for section in sections.values())
