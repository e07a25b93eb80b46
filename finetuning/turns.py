"""Turns of a conversation in the order that chat templates know: what can be mended is, the rest has a named reason."""

from collections import Counter

from config.sections import DatasetSection
from finetuning.messages import WRITTEN_CALLS, BadRow, Message


def in_order(messages: list[Message], section: DatasetSection, notes: Counter[str]) -> list[Message]:
    """The turns up to the assistant's last one, mended as the section says."""
    end = len(messages)
    while end and messages[end - 1]["role"] != "assistant":
        end -= 1
    if not end:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadRow("no_assistant", f"no message has role 'assistant'; found {roles}")
    if end < len(messages):
        notes["trailing turns cut"] += len(messages) - end
    turns: list[Message] = []
    for number in range(end):
        _add(turns, number, messages[number], section, notes)
    if not any(turn["role"] == "assistant" and turn.get("train", True) for turn in turns):
        raise BadRow("nothing_to_train", "weight or train switches every turn of the assistant off")
    return turns


def _add(turns: list[Message], number: int, message: Message, section: DatasetSection, notes: Counter[str]) -> None:
    role, last = message["role"], turns[-1] if turns else None
    if role == "system" and last:
        _add_system(turns, number, message, section, notes)
        return
    if role == "tool":
        _check_call(number, last)
    elif last and last["role"] == role:
        turns[-1] = _merged(last, number, message, section)
        notes["turns of the same role merged"] += 1
        return
    elif role == "assistant" and (not last or (last["role"] == "system" and len(turns) == 1)):
        if section.on_assistant_first == "drop":
            text = f"message {number}: the assistant speaks before the user (dataset.on_assistant_first='drop')"
            raise BadRow("assistant_first", text)
        notes["conversations begun by the assistant"] += 1
    turns.append(message)


def _add_system(
    turns: list[Message], number: int, message: Message, section: DatasetSection, notes: Counter[str]
) -> None:
    if len(turns) == 1 and turns[0]["role"] == "system":
        turns[0] = joined_systems(turns[0], message)
        notes["system messages joined"] += 1
        return
    if section.on_late_system == "drop":
        text = f"message {number} has role 'system' and is not the first (dataset.on_late_system='drop')"
        raise BadRow("late_system", text)
    notes["late system messages kept"] += 1
    turns.append(message)


def joined_systems(first: Message, second: Message) -> Message:
    contents = [message["content"] for message in (first, second) if message["content"].strip()]
    return {**first, "content": "\n\n".join(contents)}


def _check_call(number: int, last: Message | None) -> None:
    """`last` is the turn before a tool's. Another tool's was checked when it came."""
    if last and (last["role"] == "tool" or last.get("tool_calls")):
        return
    if not last or last["role"] != "assistant" or not any(mark in last["content"] for mark in WRITTEN_CALLS):
        before = f"a message of role {last['role']!r} without tool calls" if last else "nothing"
        raise BadRow("tool_without_call", f"message {number} has role 'tool' and comes after {before}")


def _merged(first: Message, number: int, second: Message, section: DatasetSection) -> Message:
    role = second["role"]
    text = f"message {number} has role {role!r} like the one before"
    if section.on_repeated_role == "drop":
        raise BadRow("repeated_role", f"{text} (dataset.on_repeated_role='drop')")
    if first.get("tool_calls") or second.get("tool_calls"):
        raise BadRow("repeated_role", f"{text}, and turns with tool calls cannot be merged")
    for key in ("train", "name"):
        if first.get(key) != second.get(key):
            raise BadRow("repeated_role", f"{text}, but another `{key}`, so that they cannot be merged")
    if "reasoning_content" in second:
        raise BadRow("repeated_role", f"{text}, and it has reasoning of its own, so that they cannot be merged")
    return {**first, "content": f"{first['content']}\n\n{second['content']}"}
