"""The chat template: which one a model is trained, saved and served with, and which tokens of a conversation it trains.

Trained are the assistant's turns with the token that ends them. Where they are, a template says with `{% generation %}`
marks; TRL has marked twins of the templates it knows. For others a turn is what the template adds to the prompt that
serving would send, which needs a template that never goes back on what it has rendered.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from config.sections import ModelSection
from finetuning.errors import Failure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for a tokenizer that has no template of its own."""

Message = dict[str, Any]
Span = tuple[int, int]
"""Start and end, in characters of the rendered text."""
logger = logging.getLogger(__name__)


class Rendered(NamedTuple):
    text: str
    trained: list[Span]
    """In order, without overlap."""


def choose_template(tokenizer: "PreTrainedTokenizerBase", section: ModelSection) -> tuple[str, str]:
    """The template to use from now on, and in a few words which one it is. Raises Failure."""
    from trl import chat_template_utils as known

    own = tokenizer.chat_template
    if section.chat_template_file:
        return _template_file(section.chat_template_file), f"the file {section.chat_template_file}"
    if not own:
        return CHATML_TEMPLATE, "ChatML, as it has none"
    hybrid = own == known.qwen3_chat_template
    without_thinking = (Path(known.__file__).parent / "chat_templates" / "qwen3_instruct_2507.jinja").read_text()
    if section.chat_style == "no_think" and not (hybrid or own == without_thinking):
        raise Failure(
            "configuration",
            "model.chat_style='no_think' is for Qwen3's hybrid template, and this tokenizer has another. Set it to "
            "'keep', or give model.chat_template_file.",
        )
    if hybrid and section.chat_style != "keep":
        return without_thinking, "Qwen3's without think blocks (model.chat_style)"
    return own, "its own"


def _template_file(name: str) -> str:
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        message = f"model.chat_template_file={name!r}: {error}. Correct the path, or the template in it."
        raise Failure("configuration", message) from None
    return text


class Renderer:
    """Renders conversations as they are trained on and as they are served."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", assistant_only: bool):
        self.tokenizer, self.assistant_only = tokenizer, assistant_only
        self.served_template = tokenizer.chat_template
        self.training_template = self._marked() if assistant_only else None

    def _marked(self) -> str | None:
        """The template, or its twin, with marks; None: turns are found by what each adds to its prompt."""
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        if has_generation_markers(self.served_template):
            return self.served_template
        try:
            return get_training_chat_template(self.tokenizer)
        except ValueError:
            logger.info("the chat template has no marks: assistant turns are what each adds to its prompt")
            return None

    def trained(self, row: dict[str, Any]) -> Rendered:
        """A conversation as text with the parts that are trained. Raises ValueError when they cannot be told."""
        if "text" in row:
            text = row["text"] + (self.tokenizer.eos_token or "")
            return Rendered(text, [(0, len(text))])
        messages = [{key: value for key, value in message.items() if key != "train"} for message in row["messages"]]
        if not self.assistant_only:
            text = self._render(self.served_template, messages, row.get("tools"))
            refuse_unrendered_tools(row, text)
            return Rendered(text, [(0, len(text))])
        text, spans = self._turns(messages, row.get("tools"))
        refuse_unrendered_tools(row, text)
        turns = [message for message in row["messages"] if message["role"] == "assistant"]
        if len(spans) != len(turns):
            raise ValueError(f"the template marks {len(spans)} parts as trained, of {len(turns)} assistant turns")
        return Rendered(text, [span for span, turn in zip(spans, turns, strict=True) if turn.get("train", True)])

    def _turns(self, messages: list[Message], tools: Any) -> tuple[str, list[Span]]:
        if self.training_template:
            return self._render(self.training_template, messages, tools, marks=True)
        text = self._render(self.served_template, messages, tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self.prompt(messages[:number], tools)
                turn = self._render(self.served_template, messages[: number + 1], tools)
                if not (text.startswith(turn) and turn.startswith(prompt)):
                    raise ValueError(
                        f"the template renders the conversation up to message {number} in another way when more "
                        "follows, so that the turn cannot be told from its prompt"
                    )
                spans.append((len(prompt), len(turn)))
        return text, spans

    def prompt(self, messages: list[Message], tools: Any = None) -> str:
        """What serving sends to the model to have it answer."""
        return self._render(self.served_template, messages, tools, add_generation_prompt=True)

    def turns_that_differ(self, row: dict[str, Any], rendered: Rendered) -> tuple[int, list[str]]:
        """How many assistant turns there are, and the prompts as served of those before which training shows other
        text."""
        if "text" in row:
            return 0, []
        turns = [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        prompts = [self.prompt(row["messages"][:number], row.get("tools")) for number in turns]
        return len(turns), [prompt for prompt in prompts if not rendered.text.startswith(prompt)]

    def _render(self, template: str, messages: list[Message], tools: Any, marks: bool = False, **options: Any) -> Any:
        """The text, with `marks` also the marked spans."""
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        options |= self.tokenizer.special_tokens_map
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=marks,
                **options,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from None
        return (texts[0], spans[0]) if marks else texts[0]


def refuse_unrendered_tools(row: dict[str, Any], text: str) -> None:
    """Raises ValueError when the template leaves a tool or a call out: the model would learn to answer without it."""
    calls = [call for message in row["messages"] for call in message.get("tool_calls", ())]
    for what, entries in (("tool", row.get("tools", ())), ("call of the tool", calls)):
        for entry in entries:
            name = entry.get("function", entry).get("name")
            if name and name not in text:
                raise ValueError(f"the chat template leaves the {what} {name!r} out (model.chat_template_file)")


def reasoning_left_out(row: dict[str, Any], text: str) -> int:
    """How many turns have reasoning that is not in the text."""
    thoughts = (message.get("reasoning_content", "").strip() for message in row.get("messages", ()))
    return sum(thought not in text for thought in thoughts)


def turn_end(tokenizer: "PreTrainedTokenizerBase", renderer: Renderer) -> str | None:
    """The token, which no text has, that a trained turn ends with: a model that never sees its turn end never stops.

    That need not be eos: Gemma's eos ends a document, and its turns end with another token. Raises ValueError when the
    template does not render a question and an answer.
    """
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    rendered = renderer.trained(row)
    turn = rendered.text[slice(*rendered.trained[-1])].rstrip()
    return max(filter(turn.endswith, tokenizer.get_added_vocab()), key=len, default=None)
