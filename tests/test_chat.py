"""Which template is used, which tokens are trained, and whether training shows what serving sends."""

from pathlib import Path
from typing import Any

import pytest

from config.sections import ModelSection
from finetuning.chat import CHATML_TEMPLATE, Renderer, choose_template, reasoning_left_out, turn_end
from finetuning.errors import Failure
from finetuning.model import load_tokenizer
from tests.conftest import PROJECT
from tests.tiny import like_gemma, without_template

SAMPLE = PROJECT / "samples" / "model"
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
ROW: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is my order?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": {"id": 7}}}]},
        {"role": "tool", "content": "on its way"},
        {"role": "assistant", "content": "On its way."},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "You're welcome."},
    ],
    "tools": TOOLS,
}
PLAIN: dict[str, Any] = {
    "messages": [message for message in ROW["messages"] if message["role"] in ("user", "assistant")]
}
PLAIN["messages"] = [message for message in PLAIN["messages"] if message.get("content")]


def tokenizer(template: str | None = None, base: Path = SAMPLE) -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(base)
    if template:
        found.chat_template = template
    return found


def hybrid() -> Any:
    from trl.chat_template_utils import qwen3_chat_template

    return tokenizer(qwen3_chat_template)


def trained(renderer: Renderer, row: dict[str, Any]) -> list[str]:
    rendered = renderer.trained(row)
    return [rendered.text[start:end] for start, end in rendered.trained]


def test_the_hybrid_template_is_exchanged_unless_it_is_to_be_kept() -> None:
    template, told = choose_template(hybrid(), ModelSection())
    assert "without think blocks" in told
    assert "<think>" not in template
    for style, expected in (("keep", hybrid().chat_template), ("no_think", template)):
        assert choose_template(hybrid(), ModelSection(chat_style=style))[0] == expected


def test_another_template_stays_and_cannot_be_no_think() -> None:
    own = tokenizer("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert choose_template(own, ModelSection()) == (own.chat_template, "its own")
    with pytest.raises(Failure, match=r"model.chat_style='no_think' is for Qwen3's hybrid template.*'keep'"):
        choose_template(own, ModelSection(chat_style="no_think"))


def test_a_file_counts_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(CHATML_TEMPLATE)
    section = ModelSection(chat_template_file=str(file))
    assert choose_template(tokenizer(), section) == (CHATML_TEMPLATE, f"the file {file}")
    file.write_text("{% for %}")
    with pytest.raises(Failure, match=r"model.chat_template_file='.*template.jinja'"):
        choose_template(tokenizer(), section)
    file.unlink()
    with pytest.raises(Failure, match="No such file"):
        choose_template(tokenizer(), section)


@pytest.mark.parametrize("style", ["no_think", "keep"])
def test_trained_are_the_assistants_turns_with_their_end(style: str) -> None:
    found = hybrid()
    found.chat_template, _ = choose_template(found, ModelSection(chat_style=style))
    renderer = Renderer(found, assistant_only=True)
    call, answer, thanks = trained(renderer, ROW)
    assert '{"name": "find", "arguments": {"id": 7}}' in call
    assert answer.removeprefix("<think>\n\n</think>\n\n") == "On its way.<|im_end|>\n"
    assert thanks.removeprefix("<think>\n\n</think>\n\n") == "You're welcome.<|im_end|>\n"
    assert turn_end(found, renderer) == "<|im_end|>"


def test_a_turn_that_is_not_to_be_trained_is_left_out() -> None:
    found = hybrid()
    found.chat_template, _ = choose_template(found, ModelSection())
    messages = [dict(message) for message in ROW["messages"]]
    messages[4]["train"] = False
    turns = trained(Renderer(found, assistant_only=True), {**ROW, "messages": messages})
    assert [turn.partition("<|im_end|>")[0] for turn in turns][1:] == ["You're welcome."]


def test_without_marks_a_turn_is_what_it_adds_to_its_prompt(tmp_path: Path) -> None:
    plain = tokenizer(CHATML_TEMPLATE)
    assert trained(Renderer(plain, assistant_only=True), PLAIN) == [
        "On its way.<|im_end|>\n",
        "You're welcome.<|im_end|>\n",
    ]
    takes_back = CHATML_TEMPLATE.replace("message['content']", "(message['content'] if loop.last else '...')")
    with pytest.raises(ValueError, match="in another way when more follows"):
        Renderer(tokenizer(takes_back), assistant_only=True).trained(PLAIN)


def test_everything_is_trained_when_that_is_asked_for() -> None:
    renderer = Renderer(tokenizer(CHATML_TEMPLATE), assistant_only=False)
    [text] = trained(renderer, PLAIN)
    assert text.startswith("<|im_start|>user\nWhere")
    assert trained(renderer, {"text": "Once upon a time"}) == ["Once upon a time<|im_end|>"]


@pytest.mark.parametrize("row", [ROW, PLAIN], ids=["tools", "plain"])
def test_training_shows_what_serving_sends(row: dict[str, Any], tmp_path: Path) -> None:
    """For the templates of our recipes: Qwen3's, the example's, ChatML. The hybrid one kept does not."""
    without = hybrid()
    without.chat_template, _ = choose_template(without, ModelSection())
    chatml, _ = load_tokenizer(without_template(tmp_path / "base"), ModelSection())
    for found in [without, tokenizer()] + [chatml] * (row is PLAIN):
        renderer = Renderer(found, assistant_only=True)
        turns = sum(message["role"] == "assistant" for message in row["messages"])
        assert renderer.turns_that_differ(row, renderer.trained(row)) == (turns, [])
    kept = Renderer(hybrid(), assistant_only=True)
    assert kept.turns_that_differ(row, kept.trained(row))[1]


def test_a_template_that_never_ends_a_turn_is_noticed() -> None:
    endless = tokenizer(CHATML_TEMPLATE.replace("+ '<|im_end|>'", ""))
    assert turn_end(endless, Renderer(endless, assistant_only=True)) is None


def test_tools_that_the_template_leaves_out_are_refused() -> None:
    chatml = CHATML_TEMPLATE.replace("message['content']", "(message['content'] or '')")
    with pytest.raises(ValueError, match="the chat template leaves the tool 'find' out"):
        Renderer(tokenizer(chatml), assistant_only=True).trained(ROW)
    with pytest.raises(ValueError, match="leaves the call of the tool 'find' out"):
        Renderer(tokenizer(chatml), assistant_only=True).trained({"messages": ROW["messages"]})


def test_reasoning_is_kept_or_its_loss_is_counted() -> None:
    from trl.chat_template_utils import qwen3_chat_template

    answer = {"role": "assistant", "content": "Blue.", "reasoning_content": "The lamp on the desk."}
    row = {"messages": [PLAIN["messages"][0], answer]}
    kept, without = tokenizer(qwen3_chat_template), tokenizer()
    assert reasoning_left_out(row, Renderer(kept, assistant_only=True).trained(row).text) == 0
    assert "<think>\nThe lamp on the desk.\n</think>" in trained(Renderer(kept, assistant_only=True), row)[0]
    assert reasoning_left_out(row, Renderer(without, assistant_only=True).trained(row).text) == 1


def test_the_end_of_a_turn_need_not_be_eos(tmp_path: Path) -> None:
    """Gemma's eos ends a document, its turns end with another token, the assistant is called model."""
    found, told = load_tokenizer(like_gemma(tmp_path / "base"), ModelSection())
    renderer = Renderer(found, assistant_only=True)
    assert told == "its own"
    assert (found.eos_token, turn_end(found, renderer)) == ("<eos>", "<end_of_turn>")
    row = {"messages": PLAIN["messages"][:2]}
    assert renderer.trained(row).text == (
        "<bos><start_of_turn>user\nWhere is my order?<end_of_turn>\n<start_of_turn>model\nOn its way.<end_of_turn>\n"
    )
    assert trained(renderer, PLAIN) == ["On its way.<end_of_turn>\n", "You're welcome.<end_of_turn>\n"]
    assert renderer.turns_that_differ(PLAIN, renderer.trained(PLAIN)) == (2, [])
    with pytest.raises(ValueError, match="the chat template refuses it: System role not supported"):
        renderer.trained({"messages": [ROW["messages"][0], *PLAIN["messages"]]})


def test_tools_that_are_left_out_are_refused_without_a_mask_as_well() -> None:
    chatml = CHATML_TEMPLATE.replace("message['content']", "(message['content'] or '')")
    with pytest.raises(ValueError, match="the chat template leaves the tool 'find' out"):
        Renderer(tokenizer(chatml), assistant_only=False).trained(ROW)
