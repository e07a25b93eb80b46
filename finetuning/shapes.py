"""One row of any known shape becomes one plain conversation, or a named reason why not.

    messages           `messages`: a list, or JSON text of one as in a CSV cell
    sharegpt           `conversations` or `conversation`: from and value (or role and content) a message
    prompt_completion  `prompt` and `completion` or `response`: text, or lists of messages
    alpaca             `instruction`, `output`, and perhaps `input`, `history` ([user, assistant] pairs)
    input_output       `conversation`: {"input", "output"} pairs; or `input` and `output`, `question` and `answer`
    text               `text`, as it is: no roles, no chat template

Of the other columns only `tools` counts, and `system` unless the shape is `messages`. What a message may hold, and what
becomes of null: see `finetuning.messages`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from config.sections import DatasetSection
from finetuning.messages import (
    BadRow,
    Message,
    Place,
    as_list,
    from_json,
    holds,
    plain,
    read_message,
    says_nothing,
    shown,
    sound_text,
)
from finetuning.turns import in_order, joined_systems

COLUMNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "sharegpt": (("conversations",), ("conversation",)),
    "prompt_completion": (("prompt", "completion"), ("prompt", "response")),
    "alpaca": (("instruction", "output"),),
    "input_output": (("conversation",), ("conversations",), ("input", "output"), ("question", "answer")),
    "text": (("text",),),
}
"""The columns of a shape, in alternatives. Where several shapes fit, the first one is meant."""
SHAPES = tuple(COLUMNS)
MOST_SHOWN = 20

Read = Iterator[tuple[Place, Any]]
"""Messages as the row has them, each with its place there."""


def shape_of(values: dict[str, Any]) -> str | None:
    """Which shape the columns that hold something have, else the columns by name; None when none fits. Never `text`:
    that leaves the chat template out, so it has to be asked for."""
    for columns in (_holding(values), set(values)):
        for shape in SHAPES[:-1]:
            if needed := _alternative(shape, columns):
                return "input_output" if shape == "sharegpt" and _has_pairs(values[needed[0]]) else shape
    return "prompt_completion" if "prompt" in values else None


def normalise(values: dict[str, Any], section: DatasetSection, notes: Counter[str]) -> tuple[str, dict[str, Any]]:
    """The shape, and `{"messages", "tools"?}` or `{"text"}` in new objects; `notes` counts what was mended. Raises
    BadRow only."""
    mended = Counter[str]()
    try:
        shape = _shape(values, section.shape)
        row = _row(values, shape, section, mended)
    except RecursionError:
        raise BadRow("too_deep", "its values are nested too deep to be read") from None
    notes.update(mended)
    return shape, row


def _row(values: dict[str, Any], shape: str, section: DatasetSection, notes: Counter[str]) -> dict[str, Any]:
    if shape == "text":
        return {"text": read_message("text", {"role": "user", "content": values["text"]}, notes)["content"]}
    messages = [read_message(place, raw, notes) for place, raw in READERS[shape](values)]
    if not messages:
        [column, *_] = _columns(shape, values)
        raise BadRow("empty", f"`{column}` is {shown(values[column])}: there is no message")
    messages = in_order(messages, section, notes)
    if shape != "messages":
        messages = _with_system(values.get("system"), messages, notes)
    tools = _tools(values.get("tools"), notes)
    return {"messages": messages, "tools": tools} if tools else {"messages": messages}


def _shape(values: dict[str, Any], asked: str) -> str:
    if not isinstance(values, dict):
        raise BadRow("unknown_shape", f"the row is {shown(values)}, not an object with columns")
    if asked == "auto":
        if shape := shape_of(values):
            return shape
        remedy = "to train on `text` as it is, without a chat template, set dataset.shape=text"
        expected = f"expected {_needed(*SHAPES[:-1])}"
        raise BadRow("unknown_shape", f"{_found(values)}; {remedy if 'text' in values else expected}")
    if not _alternative(asked, set(values)) and not (asked == "prompt_completion" and "prompt" in values):
        raise BadRow("wrong_shape", f"{_found(values)}; dataset.shape={asked} expects {_needed(asked)}")
    return asked


def _found(values: dict[str, Any]) -> str:
    return f"found columns {', '.join(shown(column)[1:-1] for column in list(values)[:MOST_SHOWN]) or '(none)'}"


def _needed(*shapes: str) -> str:
    alternatives = dict.fromkeys(columns for shape in shapes for columns in COLUMNS[shape])
    return ", or ".join(" and ".join(f"`{column}`" for column in columns) for columns in alternatives)


def _holding(values: dict[str, Any]) -> set[str]:
    return {column for column, value in values.items() if holds(value)}


def _alternative(shape: str, columns: set[str]) -> tuple[str, ...] | None:
    return next(filter(columns.issuperset, COLUMNS[shape]), None)


def _columns(shape: str, values: dict[str, Any]) -> tuple[str, ...] | None:
    return _alternative(shape, _holding(values)) or _alternative(shape, set(values))


def _listed(column: str, value: Any) -> list[Any]:
    if says_nothing(value):
        return []
    items = as_list(from_json(value) if isinstance(value, str) else value)
    if items is None:
        raise BadRow("not_messages", f"`{column}` is {shown(value)}, which is no list, nor JSON text of one")
    return items


def _has_pairs(conversation: Any) -> bool:
    """Whether it is Capybara's own form."""
    items = as_list(from_json(conversation) if isinstance(conversation, str) else conversation)
    return bool(items) and isinstance(items[0], dict) and {"input", "output"} <= items[0].keys()


def _messages(values: dict[str, Any]) -> Read:
    yield from enumerate(_listed("messages", values["messages"]))


def _sharegpt(values: dict[str, Any]) -> Read:
    [column] = _columns("sharegpt", values)
    yield from enumerate(_listed(column, values[column]))


def _prompt_completion(values: dict[str, Any]) -> Read:
    columns = _columns("prompt_completion", values)
    if not columns or values[columns[1]] is None:
        raise BadRow("no_assistant", f"{_found(values)}; there is no `completion` or `response` to the prompt")
    for column, role in zip(columns, ("user", "assistant"), strict=True):
        if (messages := as_list(values[column])) is None:
            yield column, {"role": role, "content": values[column]}
        else:
            yield from ((f"{column}[{number}]", message) for number, message in enumerate(messages))


def _alpaca(values: dict[str, Any]) -> Read:
    for number, pair in enumerate(_listed("history", values.get("history"))):
        turns = as_list(pair)
        if turns is None or len(turns) != 2:
            raise BadRow("bad_history", f"`history[{number}]` is {shown(pair)}, expected [user, assistant]")
        yield f"history[{number}][0]", {"role": "user", "content": turns[0]}
        yield f"history[{number}][1]", {"role": "assistant", "content": turns[1]}
    task, extra = values["instruction"], values.get("input")
    if extra is not None and sound_text("input", extra).strip() and isinstance(task, str):
        task = f"{task}\n\n{extra}" if task.strip() else extra
    yield "instruction", {"role": "user", "content": task}
    yield "output", {"role": "assistant", "content": values["output"]}


def _input_output(values: dict[str, Any]) -> Read:
    columns = _columns("input_output", values)
    pairs = [("", values)]
    if len(columns) == 1:
        [column], columns = columns, ("input", "output")
        pairs = [(f"{column}[{number}].", pair) for number, pair in enumerate(_listed(column, values[column]))]
    for path, pair in pairs:
        if not isinstance(pair, dict) or not pair.keys() >= set(columns):
            raise BadRow("not_messages", f"`{path[:-1]}` is {shown(pair)}, expected an object with input and output")
        for column, role in zip(columns, ("user", "assistant"), strict=True):
            yield f"{path}{column}", {"role": role, "content": pair[column]}


READERS = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "prompt_completion": _prompt_completion,
    "alpaca": _alpaca,
    "input_output": _input_output,
}


def _with_system(value: Any, messages: list[Message], notes: Counter[str]) -> list[Message]:
    """Put the row's own system prompt first, unless the conversation begins with the same."""
    if value is None:
        return messages
    system, first = read_message("system", {"role": "system", "content": value}, notes), messages[0]
    if not system["content"].strip() or first == system:
        return messages
    if first["role"] != "system":
        return [system, *messages]
    notes["system messages joined"] += 1
    return [joined_systems(system, first), *messages[1:]]


def _tools(value: Any, notes: Counter[str]) -> list[Any]:
    """The tools of this row, each an object or JSON text of one."""
    if says_nothing(value):
        return []
    in_text = isinstance(value, str)
    tools = as_list(from_json(value) if in_text else value)
    if tools is None:
        raise BadRow("bad_tools", f"`tools` is {shown(value)}, which is no list, nor JSON text of one")
    read = []
    for number, raw in enumerate(tools):
        tool = from_json(raw) if isinstance(raw, str) else raw
        if not isinstance(tool, dict):
            raise BadRow("bad_tools", f"`tools[{number}]` is {shown(raw)}, which is no object, nor JSON text of one")
        read.append(plain(f"tools[{number}]", tool, None if in_text or isinstance(raw, str) else notes))
    return read
