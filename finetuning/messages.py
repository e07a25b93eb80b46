"""Messages of a conversation: each is read into one plain form, then all are put into an order that templates know.

A message comes out with `role` (system, user, assistant, tool), `content` (text; null only beside `tool_calls`) and,
where the source has them, `reasoning_content`, `tool_calls`, `name`, `tool_call_id`, and `train`: false for a turn of
the assistant that is context only. Its other keys are left out. Text stays as it is, byte for byte.

Null says nothing: Arrow gives each object the keys of all others in its column, as nulls. So keys with null are left
out, also in tool calls and tools, where an explicit null cannot be told from an invented one. What is JSON text in the
row (the arguments, the calls or the tools as a string) Arrow has not touched: it keeps its nulls.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]
Place = int | str
"""Number of a message as the source counts them, from 0, or the column (or part of one) that it was made of."""

ROLES = {
    word: role
    for role, words in {
        "system": "system developer",
        "user": "user human prompter",
        "assistant": "assistant gpt bot model chatgpt bing bard ai",
        "tool": "tool function observation tool_response ipython",
        "function_call": "function_call",  # ShareGPT: a turn of the assistant that is a call
    }.items()
    for word in words.split()
}
REASONING = ("reasoning_content", "reasoning", "thinking")
KNOWN_KEYS = {
    *("role", "from", "content", "value", "name", "weight", "train", "training"),
    *("tool_calls", "function_call", "tool_call_id", *REASONING),
}
CALL_KEYS = {"id", "type", "index", "function", "name", "arguments"}
WRITTEN_CALLS = ("<tool_call>", "<functioncall>")
"""How Hermes and Glaive write a tool call into the text of a turn."""
LONGEST_SHOWN = 100


class BadRow(ValueError):
    """A row that cannot be trained on: `reason` is a word to count by, `text` says it to people, in one line."""

    def __init__(self, reason: str, text: str):
        super().__init__(reason, text)  # both are args, so that the exception survives pickling
        self.reason, self.text = reason, text

    def __str__(self) -> str:
        return self.text


def at(place: Place) -> str:
    return f"message {place}" if isinstance(place, int) else f"`{place}`"


def shown(value: Any) -> str:
    """A value in a few words and in one line, however large or deep it is."""
    text = " ".join(reprlib.repr(value).split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def holds(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value)


def says_nothing(value: Any) -> bool:
    """Of what may be JSON text: null, or no text, or JSON's null."""
    return value is None or (isinstance(value, str) and value.strip() in ("", "null"))


def from_json(text: str) -> Any:
    """None when it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_list(value: Any) -> list[Any] | None:
    """A list, a tuple or a NumPy array, which is what readers of parquet give; None for anything else."""
    if isinstance(value, list | tuple):
        return list(value)
    items = value.tolist() if hasattr(value, "tolist") else None
    return items if isinstance(items, list) else None


def sound_text(place: Place, value: Any, key: str = "content") -> str:
    if not isinstance(value, str):
        raise BadRow("not_text", f"{at(place)} has {key} {shown(value)} ({type(value).__name__}), which is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        text = f"{at(place)}: character {error.start} of its {key} is {shown(value[error.start])}, a lone surrogate"
        raise BadRow("surrogate", text) from None
    return value


def plain(place: Place, value: Any, notes: Counter[str] | None) -> Any:
    """A copy of a JSON value. With `notes` keys with null are left out of objects, and counted there."""
    if isinstance(value, str):
        return sound_text(place, value, "text")
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if notes is None or item is not None}
        if len(kept) < len(value):
            notes["nulls left out of tools and calls"] += len(value) - len(kept)
        return {sound_text(place, key, "key"): plain(place, item, notes) for key, item in kept.items()}
    items = as_list(value)
    if items is None:
        raise BadRow("not_json", f"{at(place)} has {shown(value)} ({type(value).__name__}), which JSON does not know")
    return [plain(place, item, notes) for item in items]


def read_message(place: Place, raw: Any, notes: Counter[str]) -> Message:
    """Raises BadRow, as all functions here do."""
    if not isinstance(raw, dict):
        raise BadRow("not_messages", f"{at(place)} is {shown(raw)}, expected an object with role and content")
    role = _role(place, raw, notes)
    content = raw["content"] if raw.get("content") is not None else raw.get("value")
    if role == "function_call":
        role, content, calls = "assistant", None, _calls(place, content, notes)
    else:
        calls = _own_calls(place, raw, role, notes)
    message: Message = {"role": role, "content": _content(place, content, notes)}
    for key, source in _further_texts(raw, role):
        message[key] = sound_text(place, raw[source], source)
    if calls:
        message["tool_calls"] = calls
    if not _is_trained(place, raw, role) and role == "assistant":
        message["train"] = False
    if any(raw[key] is not None for key in raw.keys() - KNOWN_KEYS):
        notes["messages with keys left out"] += 1
    _check_content(place, message)
    return message


def _role(place: Place, raw: Message, notes: Counter[str]) -> str:
    word = raw["role"] if raw.get("role") is not None else raw.get("from")
    role = ROLES.get(word.lower()) if isinstance(word, str) else None
    if role is None:
        raise BadRow("unknown_role", f"{at(place)} has role {shown(word)}, which is none of {', '.join(ROLES)}")
    if role != word or role == "function_call":
        notes["roles mapped"] += 1
    return role


def _content(place: Place, value: Any, notes: Counter[str]) -> str | None:
    if value is None:
        return None
    if (parts := as_list(value)) is None:
        return sound_text(place, value)
    notes["contents joined from parts"] += 1
    return "".join(_part(place, part) for part in parts)


def _part(place: Place, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind is None and holds(part.get("text")):  # Bedrock's have no type
        kind = "text"
    if not isinstance(kind, str) or kind != "text":
        text = f"{at(place)} has a part of type {shown(kind)}, {shown(part)}; only text can be trained on"
        raise BadRow("not_text_part", text)
    return sound_text(place, part.get("text"), "text part")


def _further_texts(raw: Message, role: str) -> Iterator[tuple[str, str]]:
    """Keys of text beside the content, each with the key that the source has it under."""
    if role == "assistant" and (source := next((key for key in REASONING if holds(raw.get(key))), None)):
        yield "reasoning_content", source
    for key in ("name", "tool_call_id"):
        if raw.get(key) is not None:
            yield key, key


def _own_calls(place: Place, raw: Message, role: str, notes: Counter[str]) -> list[Message]:
    value = raw.get("tool_calls")
    if says_nothing(value) or as_list(value) == []:
        value = raw.get("function_call")  # OpenAI's older key, for a single call
    calls = [] if says_nothing(value) else _calls(place, value, notes)
    if calls and role != "assistant":
        raise BadRow("bad_tool_call", f"{at(place)} has tool calls and role {role!r}; only the assistant calls tools")
    return calls


def _calls(place: Place, value: Any, notes: Counter[str]) -> list[Message]:
    in_text = isinstance(value, str)
    found = from_json(value) if in_text else value
    calls = [found] if isinstance(found, dict) else as_list(found)
    if calls is None:
        raise BadRow(
            "bad_tool_call", f"{at(place)} has tool calls {shown(value)}, which is no list, nor JSON text of one"
        )
    return [_call(place, call, in_text, notes) for call in calls]


def _call(place: Place, call: Any, in_text: bool, notes: Counter[str]) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    function = function if isinstance(function, dict) else call
    if not isinstance(function, dict) or not holds(function.get("name")):
        raise BadRow("bad_tool_call", f"{at(place)} has tool call {shown(call)}, which names no function")
    name = sound_text(place, function["name"], "function name")
    read: Message = {"id": sound_text(place, call["id"], "call id")} if call.get("id") is not None else {}
    return read | {
        "type": "function",
        "function": {"name": name, "arguments": _arguments(place, function, in_text, notes)},
    }


def _arguments(place: Place, function: Message, in_text: bool, notes: Counter[str]) -> Message:
    """None at all when they are null, which is what Arrow makes of an empty object."""
    value = function.get("arguments")
    found = from_json(value) if isinstance(value, str) else value
    if value is None and not any(function[key] is not None for key in function.keys() - CALL_KEYS):
        return {}
    if not isinstance(found, dict):
        text = f"{at(place)} calls {shown(function['name'])} with arguments {shown(value)}, which is no JSON object"
        raise BadRow("bad_tool_arguments", text)
    if isinstance(value, str):
        notes["tool arguments parsed"] += 1
    return plain(place, found, None if in_text or isinstance(value, str) else notes)


def _check_content(place: Place, message: Message) -> None:
    """A turn that has to say something says it. A tool may return nothing, and a system prompt may be empty."""
    content = message["content"]
    if message.get("tool_calls"):
        return
    if content is None:
        raise BadRow("null_content", f"{at(place)} has content null and no tool calls")
    if message["role"] in ("user", "assistant") and (not content or content.isspace()):
        raise BadRow("empty_content", f"{at(place)} ({message['role']}) has content {shown(content)}, which is blank")


def _is_trained(place: Place, raw: Message, role: str) -> bool:
    """What `weight` (OpenAI's: 0 or 1) and `train` or `training` (true or false) say of a turn."""
    said = set()
    for key in ("weight", "train", "training"):
        if (value := raw.get(key)) is None:
            continue
        if not isinstance(value, bool) and not (key == "weight" and isinstance(value, int | float) and value in (0, 1)):
            expected = "0 or 1" if key == "weight" else "true or false"
            raise BadRow("bad_train_flag", f"{at(place)} has {key} {shown(value)}, expected {expected}")
        if value and role != "assistant":
            text = f"{at(place)} has {key} {shown(value)} and role {role!r}; only turns of the assistant are trained"
            raise BadRow("bad_train_flag", text)
        said.add(bool(value))
    if len(said) > 1:
        raise BadRow("bad_train_flag", f"{at(place)} has weight, train and training that contradict each other")
    return False not in said
