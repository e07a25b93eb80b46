"""Rows of every shape become plain conversations; what cannot is refused with a reason to count by."""

import copy
import csv
import json
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import numpy
import pytest

from config.sections import DatasetSection
from finetuning.shapes import SHAPES, BadRow, normalise, shape_of
from tests.conftest import PROJECT

UGLY = Path(__file__).parent / "data" / "ugly"
USER, ASSISTANT = {"role": "user", "content": "Which shelf?"}, {"role": "assistant", "content": "Shelf two."}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "shelf_of", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any = None, **keys: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "shelf_of", "arguments": arguments or {}}, **keys}


def calling(*calls: Any, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **keys}


def mended(row: Any, **options: Any) -> tuple[dict[str, Any], dict[str, int]]:
    notes = Counter[str]()
    return normalise(row, DatasetSection(**options), notes)[1], dict(notes)


def read(row: Any, **options: Any) -> dict[str, Any]:
    return mended(row, **options)[0]


def messages(row: Any, **options: Any) -> list[dict[str, Any]]:
    return read(row, **options)["messages"]


def refused(row: Any, **options: Any) -> tuple[str, str]:
    notes = Counter[str]()
    with pytest.raises(BadRow) as bad:
        normalise(row, DatasetSection(**options), notes)
    assert not notes, "a row that is dropped was not mended"
    assert "\n" not in bad.value.text
    return bad.value.reason, bad.value.text


def file_rows(name: str) -> list[dict[str, Any]]:
    path = UGLY / name
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            return list(csv.DictReader(file))
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.split("\n") if line]


def outcomes(name: str, **options: Any) -> tuple[list[dict[str, Any]], Counter[str], Counter[str]]:
    """The good rows of a file, the reasons of the others, the notes."""
    good, reasons, notes = [], Counter[str](), Counter[str]()
    for row in file_rows(name):
        try:
            good.append(normalise(row, DatasetSection(**options), notes)[1])
        except BadRow as bad:
            reasons[bad.reason] += 1
    return good, reasons, notes


# Files that go wrong elsewhere


def turns(*pairs: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[pair[0]], "content": pair[2:]} for pair in pairs]


@pytest.mark.parametrize(
    ("name", "expected", "notes"),
    [
        (
            "01_sharegpt_from_value.jsonl",
            turns("s:You keep a pantry.", "u:Is shelf 0 full?", "a:Shelf 0 has room for two jars."),
            {"roles mapped": 16},
        ),
        ("02_roles_human_gpt.jsonl", turns("u:Where is lid 0?", "a:Lid 0 is in the drawer."), {"roles mapped": 16}),
        (
            "04_system_in_middle.jsonl",
            turns(
                *("u:First ask.", "a:First answer.", "s:From now on answer in rhyme."),
                *("u:Second ask.", "a:A rhyme in time."),
            ),
            {"late system messages kept": 8},
        ),
        (
            "05_consecutive_user.jsonl",
            turns("u:Are you there?\n\nI asked about jar 3.", "a:Jar 3 is on the left."),
            {"turns of the same role merged": 8},
        ),
        ("13_content_parts.jsonl", turns("u:Part 0.", "a:Seen."), {"contents joined from parts": 16}),
        ("15_prompt_completion.jsonl", turns("u:Jar 0 holds", "a: 0 plums."), {}),
        ("18_alpaca.json", turns("u:Name the shelf.\n\njar 0", "a:shelf two"), {}),
    ],
)
def test_ugly_files_are_converted(name: str, expected: list, notes: dict) -> None:
    good, reasons, counted = outcomes(name)
    assert good[0] == {"messages": expected}
    assert (len(good), reasons, counted) == (8, {}, notes)


@pytest.mark.parametrize(
    "name",
    [
        *("00_control.jsonl", "11_tool_calls_null_content.jsonl", "12_tool_calls_dict_args.jsonl"),
        *(
            "19_prompt_and_messages.jsonl",
            "36_unicode.jsonl",
            "42_messages_as_string.csv",
            "45_reasoning_content.jsonl",
        ),
    ],
)
def test_ugly_files_that_are_right_come_out_as_they_are(name: str) -> None:
    good, reasons, notes = outcomes(name)
    expected = file_rows(name)
    for row in expected:
        if isinstance(row["messages"], str):
            row["messages"] = json.loads(row["messages"])
        for message in row["messages"]:
            for one in message.get("tool_calls", ()):
                if isinstance(one["function"]["arguments"], str):
                    one["function"]["arguments"] = json.loads(one["function"]["arguments"])
    kept = [{key: row[key] for key in ("messages", "tools") if key in row} for row in expected]
    assert [json.dumps(row) for row in good] == [json.dumps(dict_in_order(row)) for row in kept], "keys in order, too"
    assert (len(good), reasons) == (8, {})
    assert notes == ({"tool arguments parsed": 8} if name.startswith("11") else {})


def dict_in_order(row: dict[str, Any]) -> dict[str, Any]:
    order = ["role", "content", "reasoning_content", "name", "tool_call_id", "tool_calls"]
    rows = [{key: message[key] for key in order if key in message} for message in row["messages"]]
    return {**row, "messages": rows}


@pytest.mark.parametrize(
    ("name", "num_good", "reason"),
    [
        ("07_no_assistant.jsonl", 8, "no_assistant"),
        ("10_null_content.jsonl", 8, "null_content"),
        ("37_lone_surrogate.jsonl", 7, "surrogate"),
        ("39_empty_messages_first.jsonl", 8, "empty"),
    ],
)
def test_ugly_files_with_one_bad_row(name: str, num_good: int, reason: str) -> None:
    good, reasons, notes = outcomes(name)
    assert (len(good), reasons, notes) == (num_good, {reason: 1}, {})


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("04_system_in_middle.jsonl", {"on_late_system": "drop"}, "late_system"),
        ("05_consecutive_user.jsonl", {"on_repeated_role": "drop"}, "repeated_role"),
        ("08_starts_with_assistant.jsonl", {}, "assistant_first"),
        ("17_text_column.jsonl", {}, "unknown_shape"),
        ("18_alpaca.json", {"shape": "messages"}, "wrong_shape"),
        ("27_non_string_content.jsonl", {}, "not_text"),
    ],
)
def test_ugly_files_that_are_refused(name: str, options: dict, reason: str) -> None:
    assert outcomes(name, **options) == ([], {reason: 8}, {})


def test_ugly_files_by_setting() -> None:
    good, _, notes = outcomes("08_starts_with_assistant.jsonl", on_assistant_first="keep")
    assert good[0]["messages"] == file_rows("08_starts_with_assistant.jsonl")[0]["messages"]
    assert notes == {"conversations begun by the assistant": 8}
    good, _, _ = outcomes("17_text_column.jsonl", shape="text")
    assert good == file_rows("17_text_column.jsonl")
    good, reasons, notes = outcomes("29_mixed_schema.jsonl")
    questions = [row["messages"][0]["content"].split(":")[0] for row in good]
    assert questions == ["Question 0", "Question 1", "Question 2", "Question 3"] + ["Old style."] * 4
    assert good[-1]["messages"] == turns("u:Old style.", "a:Old reply.")
    assert (reasons, notes) == ({}, {"roles mapped": 8})


def test_huge_content_is_kept() -> None:
    huge = "One shelf after another. " * 80_000
    row = {"messages": [{"role": "user", "content": huge}, ASSISTANT]}
    assert messages(row)[0]["content"] == huge
    assert len(refused({"messages": huge})[1]) < 200


# Shapes

PAIR = [USER, ASSISTANT]


@pytest.mark.parametrize(
    ("row", "shape", "expected"),
    [
        ({"messages": PAIR}, "messages", PAIR),
        ({"messages": json.dumps(PAIR)}, "messages", PAIR),
        ({"messages": [{"from": "human", "value": "Which shelf?"}, ASSISTANT]}, "messages", PAIR),
        ({"messages": PAIR, "prompt": "x", "completion": "y", "conversations": [], "text": "z"}, "messages", PAIR),
        ({"messages": PAIR, "system": "a column that says which computer it was"}, "messages", PAIR),
        ({"messages": None, "conversations": PAIR}, "sharegpt", PAIR),
        ({"messages": "", "prompt": "Which shelf?", "completion": "Shelf two."}, "prompt_completion", PAIR),
        ({"conversations": PAIR}, "sharegpt", PAIR),
        ({"conversation": PAIR, "source": "x"}, "sharegpt", PAIR),
        ({"conversations": json.dumps(PAIR)}, "sharegpt", PAIR),
        ({"conversations": PAIR, "system": "Be brief."}, "sharegpt", [SYSTEM, *PAIR]),
        ({"conversations": [SYSTEM, *PAIR], "system": "Be brief."}, "sharegpt", [SYSTEM, *PAIR]),
        ({"conversations": PAIR, "system": " "}, "sharegpt", PAIR),
        ({"conversations": PAIR, "system": None}, "sharegpt", PAIR),
        ({"prompt": "Which shelf?", "completion": "Shelf two."}, "prompt_completion", PAIR),
        ({"prompt": "Which shelf?", "response": "Shelf two."}, "prompt_completion", PAIR),
        ({"prompt": "Which shelf?", "completion": None, "response": "Shelf two."}, "prompt_completion", PAIR),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, "prompt_completion", [SYSTEM, *PAIR]),
        ({"prompt": [SYSTEM, USER], "completion": "Shelf two."}, "prompt_completion", [SYSTEM, *PAIR]),
        ({"instruction": "Which shelf?", "output": "Shelf two."}, "alpaca", PAIR),
        ({"instruction": "Which shelf?", "input": "", "output": "Shelf two."}, "alpaca", PAIR),
        ({"instruction": "Which shelf?", "input": " \n", "output": "Shelf two."}, "alpaca", PAIR),
        ({"instruction": "Which shelf?", "input": None, "output": "Shelf two."}, "alpaca", PAIR),
        ({"instruction": "", "input": "Which shelf?", "output": "Shelf two."}, "input_output", PAIR),
        (
            {"instruction": "Name it. ", "input": " jar", "output": "Jar.", "system": "Be brief.", "history": None},
            "alpaca",
            turns("s:Be brief.", "u:Name it. \n\n jar", "a:Jar."),
        ),
        (
            {"instruction": "And?", "output": "Or.", "history": [["Which shelf?", "Shelf two."]]},
            "alpaca",
            [*PAIR, *turns("u:And?", "a:Or.")],
        ),
        ({"instruction": "And?", "output": "Or.", "history": []}, "alpaca", turns("u:And?", "a:Or.")),
        ({"conversation": [{"input": "Which shelf?", "output": "Shelf two."}] * 2}, "input_output", PAIR * 2),
        ({"conversation": '[{"input": "Which shelf?", "output": "Shelf two."}]'}, "input_output", PAIR),
        ({"input": "Which shelf?", "output": "Shelf two."}, "input_output", PAIR),
        ({"question": "Which shelf?", "answer": "Shelf two.", "system": "Be brief."}, "input_output", [SYSTEM, *PAIR]),
    ],
)
def test_every_shape(row: dict, shape: str, expected: list) -> None:
    assert shape_of(row) == shape
    assert read(row) == {"messages": expected}
    assert read(row, shape=shape) == {"messages": expected}


def test_shapes_are_those_of_the_setting() -> None:
    assert get_args(DatasetSection.model_fields["shape"].annotation) == ("auto", *SHAPES)
    assert shape_of({"text": "x", "other": 1}) is None


def test_a_setting_chooses_among_several_shapes() -> None:
    row = {"messages": PAIR, "question": "How?", "answer": "So.", "text": "As it is.\0 \n"}
    assert messages(row, shape="input_output") == turns("u:How?", "a:So.")
    assert read(row, shape="text") == {"text": "As it is.\0 \n"}


def test_rows_of_no_shape_name_their_columns() -> None:
    reason, text = refused({"id": 1, "chosen": "a", "rejected": "b"})
    assert reason == "unknown_shape"
    assert text.startswith("found columns id, chosen, rejected; expected `messages`, or `conversations`, or ")
    assert refused({}) == ("unknown_shape", text.replace("id, chosen, rejected", "(none)"))
    reason, text = refused({"text": "x"})
    assert (reason, text) == (
        "unknown_shape",
        "found columns text; to train on `text` as it is, without a chat template, set dataset.shape=text",
    )
    assert refused({"text": "x"}, shape="alpaca") == (
        "wrong_shape",
        "found columns text; dataset.shape=alpaca expects `instruction` and `output`",
    )
    assert refused({"messages": PAIR}, shape="text")[0] == "wrong_shape"
    assert refused({"completion": "x"}, shape="prompt_completion")[0] == "wrong_shape"
    assert refused({"prompt": "x"}, shape="prompt_completion")[0] == "no_assistant"
    assert refused([1])[0] == "unknown_shape"


# Roles


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("system", "system developer SYSTEM"),
        ("user", "user human prompter Human USER"),
        ("assistant", "assistant gpt bot model chatgpt bing bard ai Assistant GPT"),
    ],
)
def test_words_for_roles(role: str, words: str) -> None:
    for word in words.split():
        row = {"conversations": [*PAIR, {"from": word, "value": "More."}, *PAIR]}
        if role == "system":
            row["conversations"] = row["conversations"][2:]
        made, notes = mended(row)
        assert "More." in "".join(turn["content"] for turn in made["messages"] if turn["role"] == role), word
        assert notes.get("roles mapped", 0) == (word != role), word


def test_tool_messages_and_calls_of_sharegpt() -> None:
    for word in "tool function observation tool_response ipython Observation".split():
        value = '{"name": "shelf_of", "arguments": {"jar": 3, "row": null}}'
        steps = [{"from": "function_call", "value": value}, {"from": word, "value": ""}, {"from": "gpt", "value": "2"}]
        made, notes = mended({"conversations": [USER, *steps], "tools": json.dumps([TOOL])})
        assert made == {
            "messages": [
                *(USER, calling(call({"jar": 3, "row": None}))),
                *({"role": "tool", "content": ""}, {"role": "assistant", "content": "2"}),
            ],
            "tools": [TOOL],
        }
        assert notes == {"roles mapped": 2 + (word != "tool")}


def test_an_unknown_role_is_named() -> None:
    assert refused({"messages": [USER, {"role": "narrator", "content": "x"}]})[1].startswith(
        "message 1 has role 'narrator', which is none of system, developer, user, "
    )
    for role in (None, 3, "", ["user"], "user "):
        assert refused({"messages": [{"role": role, "content": "x"}, ASSISTANT]})[0] == "unknown_role", role


# Content


@pytest.mark.parametrize(
    ("row", "reason", "text"),
    [
        ({"messages": None}, "empty", "`messages` is None: there is no message"),
        ({"messages": []}, "empty", "`messages` is []"),
        ({"messages": ""}, "empty", "`messages` is ''"),
        ({"conversations": "[]"}, "empty", "`conversations` is '[]'"),
        ({"messages": 7}, "not_messages", "`messages` is 7, which is no list, nor JSON text of one"),
        ({"messages": "[{'role': 'user'}]"}, "not_messages", "`messages` is \"[{'role': 'user'}]\""),
        ({"messages": {"role": "user"}}, "not_messages", "`messages` is {'role': 'user'}"),
        ({"messages": ["hello"]}, "not_messages", "message 0 is 'hello', expected an object with role and content"),
        ({"messages": [USER, None]}, "not_messages", "message 1 is None"),
        ({"conversation": [{"input": "a", "output": "b"}, {}]}, "not_messages", "`conversation[1]` is {}"),
        ({"messages": [USER]}, "no_assistant", "no message has role 'assistant'; found user"),
        ({"prompt": "x"}, "no_assistant", "found columns prompt; there is no `completion` or `response` to the"),
        ({"prompt": "x", "completion": None}, "no_assistant", "found columns prompt, completion; there is no"),
        ({"prompt": [], "completion": []}, "empty", "`prompt` is []"),
        ({"prompt": [USER], "completion": []}, "no_assistant", "no message has role 'assistant'"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "null_content", "message 1 has content null"),
        ({"messages": [USER, {"role": "assistant"}]}, "null_content", "message 1 has content null"),
        ({"messages": [{"role": "user"}, ASSISTANT]}, "null_content", "message 0 has content null"),
        ({"messages": [USER, calling()]}, "null_content", "message 1 has content null"),
        ({"prompt": None, "completion": "x"}, "null_content", "`prompt` has content null"),
        ({"messages": [USER, {"role": "gpt", "content": ""}]}, "empty_content", "message 1 (assistant) has content ''"),
        ({"messages": [{"role": "user", "content": " \n"}, ASSISTANT]}, "empty_content", "message 0 (user) has conte"),
        ({"messages": [USER, {"role": "assistant", "content": []}]}, "empty_content", "message 1 (assistant)"),
        ({"instruction": "x", "output": ""}, "empty_content", "`output` (assistant) has content '', which is blank"),
        ({"messages": [USER, {"role": "assistant", "content": 7}]}, "not_text", "message 1 has content 7 (int), which"),
        ({"messages": [USER, {"role": "assistant", "content": False}]}, "not_text", "message 1 has content False (bo"),
        ({"messages": [USER, {"role": "assistant", "content": {"a": 1}}]}, "not_text", "message 1 has content {'a': "),
        ({"messages": [USER, {**ASSISTANT, "name": 3}]}, "not_text", "message 1 has name 3 (int)"),
        ({"messages": [USER, {**ASSISTANT, "thinking": ["x"]}]}, "not_text", "message 1 has thinking ['x'] (list)"),
        ({"prompt": 3, "completion": "x"}, "not_text", "`prompt` has content 3 (int)"),
        ({"instruction": "x", "input": 3, "output": "y"}, "not_text", "`input` has content 3 (int)"),
        ({"conversations": PAIR, "system": 3}, "not_text", "`system` has content 3 (int)"),
        ({"question": "x", "answer": 4.5}, "not_text", "`answer` has content 4.5 (float)"),
        ({"instruction": "x", "output": "y", "history": [["a"]]}, "bad_history", "`history[0]` is ['a'], expected"),
        ({"instruction": "x", "output": "y", "history": ["ab"]}, "bad_history", "`history[0]` is 'ab'"),
        ({"instruction": "x", "output": "y", "history": [["a", 1]]}, "not_text", "`history[0][1]` has content 1"),
    ],
)
def test_rows_that_say_nothing_or_no_text(row: dict, reason: str, text: str) -> None:
    found = refused(row)
    assert found[0] == reason
    assert found[1].startswith(text)


@pytest.mark.parametrize(
    "text", [" x ", "a\0b", "\ufeffx", "e\u0301", "\u200b", "\u00a0x\r\n", "🫙🏷️👩‍🍳", "<|im_end|>"]
)
def test_text_stays_as_it_is(text: str) -> None:
    made = [{"role": "system", "content": text}, {**USER, "content": text}, {**ASSISTANT, "content": text}]
    assert messages({"messages": made}) == made


def test_parts_are_joined_unless_they_are_no_text() -> None:
    parts = [{"type": "text", "text": "Which ", "image_url": None}, {"type": "text", "text": ""}, {"text": "shelf?"}]
    assert messages({"messages": [{"role": "user", "content": parts}, ASSISTANT]}) == PAIR
    for kind in ("image", "image_url", "input_audio", "thinking", None):
        part = {"type": kind, kind or "other": {"url": "x"}}
        reason, text = refused({"messages": [{"role": "user", "content": [*parts, part]}, ASSISTANT]})
        assert reason == "not_text_part"
        assert text.startswith(f"message 0 has a part of type {kind!r}, ")
    for content, reason in ((["x"], "not_text_part"), ([{"type": "text", "text": 3}], "not_text")):
        assert refused({"messages": [{"role": "user", "content": content}, ASSISTANT]})[0] == reason


def test_a_blank_system_prompt_or_tool_result_is_no_fault() -> None:
    made = [{**SYSTEM, "content": ""}, USER, calling(call()), {"role": "tool", "content": ""}, ASSISTANT]
    assert messages({"messages": made}) == made


def test_further_keys_of_a_message() -> None:
    made, notes = mended(
        {
            "messages": [
                {**USER, "name": "Ann", "reasoning": "of a user", "id": 7},
                {**ASSISTANT, "thinking": "Two or three?", "reasoning_content": "", "logprobs": None},
            ]
        }
    )
    assert made["messages"] == [{**USER, "name": "Ann"}, {**ASSISTANT, "reasoning_content": "Two or three?"}]
    assert notes == {"messages with keys left out": 1}
    assert messages({"messages": [USER, {**ASSISTANT, "reasoning": "Two."}]})[1]["reasoning_content"] == "Two."


HALF = "half \ud83e"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, {**ASSISTANT, "content": HALF}]},
        {"messages": [USER, {**ASSISTANT, "content": [{"type": "text", "text": HALF}]}]},
        {"messages": [USER, {**ASSISTANT, "reasoning_content": HALF}]},
        {"messages": [USER, {**ASSISTANT, "name": HALF}]},
        {"messages": json.dumps([USER, {**ASSISTANT, "content": HALF}])},
        {"messages": [USER, calling(call({"jar": HALF}))]},
        {"messages": [USER, calling(call({"jars": [{HALF: 1}]}))]},
        {"messages": [USER, calling(call(json.dumps({"jar": HALF})))]},
        {"messages": [USER, calling(call(id=HALF))]},
        {"messages": PAIR, "tools": [{HALF: 1}]},
        {"conversations": PAIR, "system": HALF},
        {"instruction": "x", "input": HALF, "output": "y"},
        {"prompt": HALF, "completion": "x"},
        {"instruction": "x", "output": "y", "history": [[HALF, "z"]]},
    ],
)
def test_lone_surrogates_are_refused(row: dict) -> None:
    reason, text = refused(row)
    assert reason == "surrogate"
    assert r"'\ud83e'" in text
    assert text.encode()


def test_a_text_row() -> None:
    assert refused({"text": HALF}, shape="text") == (
        "surrogate",
        r"`text`: character 5 of its content is '\ud83e', a lone surrogate",
    )
    for value, reason in ((None, "null_content"), (" ", "empty_content"), (3, "not_text")):
        assert refused({"text": value}, shape="text")[0] == reason


# Tools


def test_arguments_become_objects_and_nulls_stay_only_in_text() -> None:
    nested = {"row": None, "at": {"shelf": None, "jars": [None, {"jar": None}]}, "zero": 0, "no": False, "none": ""}
    kept = {"at": {"jars": [None, {}]}, "zero": 0, "no": False, "none": ""}
    calls = [call(nested, id="c0"), call(json.dumps(nested), id=None, index=None)]
    made, notes = mended({"messages": [USER, calling(*calls)]})
    assert made["messages"][1] == calling(call(kept, id="c0"), call(nested))
    assert notes == {"nulls left out of tools and calls": 3, "tool arguments parsed": 1}
    in_text = {"role": "assistant", "content": None, "tool_calls": json.dumps([call(nested)])}
    assert messages({"messages": [USER, in_text]})[1] == calling(call(nested))


def test_calls_in_other_forms() -> None:
    function = {"name": "shelf_of", "arguments": '{"jar": 3}'}
    expected = calling(call({"jar": 3}))
    for keys in (
        {"function_call": function},
        {"function_call": json.dumps(function), "tool_calls": None},
        {"function_call": {**function, "thoughts": None}, "tool_calls": []},
        {"tool_calls": [function]},
        {"tool_calls": {"function": function}},
        {"tool_calls": (call('{"jar": 3}'),)},
    ):
        assert messages({"messages": [USER, {"role": "assistant", "content": None, **keys}]})[1] == expected, keys
    without = {"type": "function", "function": {"name": "shelf_of", "arguments": None}}
    assert messages({"messages": [USER, calling(without)]})[1] == calling(call())
    for nothing in (None, [], "", "null", "[]"):
        assert messages({"messages": [USER, {**ASSISTANT, "tool_calls": nothing}]}) == PAIR, nothing
    assert (
        messages({"messages": [USER, {**calling(call()), "content": "Let me look."}]})[1]["content"] == "Let me look."
    )


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        *[("{jar: 3}", "'{jar: 3}'"), ("[1]", "'[1]'"), ('"{}"', "'\"{}\"'"), ("", "''"), ("null", "'null'")],
        *[([1], "[1]"), (3, "3"), ("[" * 100_000, "'[[[[[[[[[[[[...[[[[[[[[[[[[['")],
    ],
)
def test_arguments_that_are_no_object(arguments: Any, value: str) -> None:
    function = {"name": "shelf_of", "arguments": arguments}
    for turn in (calling({"function": function}), {"role": "function_call", "content": json.dumps(function)}):
        reason, text = refused({"messages": [USER, turn]})
        assert reason == "bad_tool_arguments"
        assert text == f"message 1 calls 'shelf_of' with arguments {value}, which is no JSON object"


def test_calls_that_are_none() -> None:
    for value in ("shelf_of(3)", 3, [3], [{}], [{"function": {}}], [{"function": {"name": ""}}], [{"name": None}]):
        reason, text = refused({"messages": [USER, {**ASSISTANT, "tool_calls": value}]})
        assert reason == "bad_tool_call"
        assert text.startswith("message 1 has tool call")
    assert refused({"conversations": [USER, {"from": "function_call", "value": "shelf_of(3)"}]})[0] == "bad_tool_call"
    assert refused({"messages": [{**USER, "tool_calls": [call()]}, ASSISTANT]})[0] == "bad_tool_call"
    renamed = {"function": {"name": "shelf_of", "parameters": {"jar": 3}}}
    assert refused({"messages": [USER, calling(renamed)]})[0] == "bad_tool_arguments", "not a call without arguments"


def test_tools_stay_with_their_row() -> None:
    other = {"type": "function", "function": {"parameters": {"required": [], "type": "object"}, "name": "lid_of"}}
    for tools in ([TOOL, other], json.dumps([TOOL, other]), [json.dumps(TOOL), json.dumps(other)], (TOOL, other)):
        for row in ({"messages": PAIR}, {"conversations": PAIR}, {"prompt": "x", "completion": "y"}):
            made = read({**row, "tools": tools})
            assert json.dumps(made["tools"]) == json.dumps([TOOL, other]), "keys in order, none invented"
    for nothing in (None, [], "", "[]", "null"):
        assert read({"messages": PAIR, "tools": nothing}) == {"messages": PAIR}, nothing
    made, notes = mended({"messages": PAIR, "tools": [{**TOOL, "strict": None}]})
    assert (made["tools"], notes) == ([TOOL], {"nulls left out of tools and calls": 1})
    for in_text in ('[{"default": null}]', ['{"default": null}']):
        assert read({"messages": PAIR, "tools": in_text})["tools"] == [{"default": None}]


@pytest.mark.parametrize("tools", [3, "shelf_of", "{}", {"name": "x"}, [3], ["shelf_of"], [[TOOL]]])
def test_tools_that_are_none(tools: Any) -> None:
    reason, text = refused({"messages": PAIR, "tools": tools})
    assert reason == "bad_tools"
    assert text.startswith("`tools")


# What is trained


@pytest.mark.parametrize(
    ("keys", "trained"),
    [
        *[({"weight": 0}, False), ({"weight": 1}, True), ({"weight": 0.0}, False), ({"weight": 1.0}, True)],
        *[({"weight": False}, False), ({"train": False}, False), ({"train": True}, True), ({"training": False}, False)],
        *[({"weight": None, "train": None}, True), ({"weight": 0, "train": False}, False)],
    ],
)
def test_flags_of_a_turn(keys: dict, trained: bool) -> None:
    made, notes = mended({"messages": [USER, {**ASSISTANT, **keys}, *PAIR]})
    assert made["messages"] == [USER, ASSISTANT if trained else {**ASSISTANT, "train": False}, *PAIR]
    assert not notes


def test_flags_that_cannot_be() -> None:
    for keys in ({"weight": 2}, {"weight": 0.5}, {"weight": "0"}, {"train": 1}, {"train": "no"}, {"training": []}):
        [(key, value)] = keys.items()
        reason, text = refused({"messages": [USER, {**ASSISTANT, **keys}]})
        assert reason == "bad_train_flag"
        assert text.startswith(f"message 1 has {key} {value!r}, expected ")
        assert text.endswith("0 or 1" if key == "weight" else "true or false")
    assert refused({"messages": [USER, {**ASSISTANT, "weight": 0, "train": True}]})[0] == "bad_train_flag"
    for role in ("user", "system"):
        row = [{"role": role, "content": "x", "weight": 1}, *PAIR]
        assert refused({"messages": row})[1].startswith(f"message 0 has weight 1 and role '{role}'; only turns of the")
        row[0]["weight"] = 0
        assert all("train" not in message for message in messages({"messages": row}))
    assert refused({"messages": [USER, {**ASSISTANT, "weight": 0}, USER]})[0] == "nothing_to_train"


# Order


def test_leading_system_messages_are_joined() -> None:
    blank, second = {**SYSTEM, "content": " "}, {**SYSTEM, "content": "Be kind."}
    made, notes = mended({"messages": [SYSTEM, blank, second, *PAIR]}, on_late_system="drop")
    assert made["messages"] == [{**SYSTEM, "content": "Be brief.\n\nBe kind."}, *PAIR]
    assert notes == {"system messages joined": 2}
    made, notes = mended({"conversations": [second, *PAIR], "system": "Be brief."})
    assert made["messages"] == [{**SYSTEM, "content": "Be brief.\n\nBe kind."}, *PAIR]
    assert notes == {"system messages joined": 1}


def test_a_system_message_later_on() -> None:
    for row in ({"messages": [USER, SYSTEM, ASSISTANT]}, {"messages": [SYSTEM, *PAIR, SYSTEM, *PAIR]}):
        assert mended(row) == (row, {"late system messages kept": 1})
    assert refused(row, on_late_system="drop") == (
        "late_system",
        "message 3 has role 'system' and is not the first (dataset.on_late_system='drop')",
    )


def test_turns_of_the_same_role() -> None:
    row = {"messages": [USER, USER, USER, ASSISTANT, ASSISTANT]}
    made, notes = mended(row)
    assert made["messages"] == turns("u:Which shelf?\n\nWhich shelf?\n\nWhich shelf?", "a:Shelf two.\n\nShelf two.")
    assert notes == {"turns of the same role merged": 3}
    assert refused(row, on_repeated_role="drop")[0] == "repeated_role"
    off = {**ASSISTANT, "weight": 0}
    assert messages({"messages": [USER, off, off, *PAIR]})[1] == {
        **turns("a:Shelf two.\n\nShelf two.")[0],
        "train": False,
    }
    for pair in (
        (calling(call()), ASSISTANT),
        (ASSISTANT, calling(call())),
        (off, ASSISTANT),
        (ASSISTANT, {**ASSISTANT, "reasoning": "Why?"}),
    ):
        assert refused({"messages": [USER, *pair]})[0] == "repeated_role"
    assert refused({"messages": [{**USER, "name": "Ann"}, {**USER, "name": "Ben"}, ASSISTANT]})[0] == "repeated_role"


def test_the_assistant_speaks_first() -> None:
    for row in ([ASSISTANT, *PAIR], [SYSTEM, ASSISTANT, *PAIR], [ASSISTANT], [SYSTEM, ASSISTANT]):
        reason, text = refused({"messages": row})
        assert reason == "assistant_first"
        assert text.startswith(f"message {row.index(ASSISTANT)}: the assistant speaks before the user")
        made, notes = mended({"messages": row}, on_assistant_first="keep")
        assert (made["messages"], notes) == (row, {"conversations begun by the assistant": 1})


def test_what_follows_the_last_answer_is_cut() -> None:
    made, notes = mended({"messages": [*PAIR, USER, SYSTEM, USER]}, on_late_system="drop", on_repeated_role="drop")
    assert (made["messages"], notes) == (PAIR, {"trailing turns cut": 3})
    result = {"role": "tool", "content": "2"}
    made, notes = mended({"messages": [USER, calling(call()), result]})
    assert (made["messages"], notes) == ([USER, calling(call())], {"trailing turns cut": 1})


def test_tools_answer_calls() -> None:
    result = {"role": "tool", "content": "2", "tool_call_id": "c0", "name": "shelf_of"}
    good = [USER, calling(call(id="c0"), call(id="c1")), result, result, ASSISTANT, *PAIR]
    assert mended({"messages": good}) == ({"messages": good}, {})
    written = [USER, {**ASSISTANT, "content": '<tool_call>{"name": "shelf_of"}</tool_call>'}, result, ASSISTANT]
    assert messages({"messages": written}) == written, "a call within the text"
    for row in (
        [USER, result, ASSISTANT],
        [{**USER, "content": "<tool_call>"}, result, ASSISTANT],
        [*PAIR, result, ASSISTANT],
        [result, *PAIR],
        [*good[:3], USER, *good[3:]],
    ):
        reason, text = refused({"messages": row}, on_assistant_first="keep")
        assert reason == "tool_without_call"
        assert "has role 'tool' and comes after " in text


# Whatever comes in


def test_arrays_and_tuples_are_lists() -> None:
    content = numpy.array([{"type": "text", "text": "Which shelf?"}], dtype=object)
    arguments = {"jars": numpy.array([1, 2]), "names": ("a", None)}
    row = {
        "messages": numpy.array(
            [{"role": "user", "content": content, "tool_calls": None}, calling(call(arguments))], dtype=object
        ),
        "tools": numpy.array([TOOL], dtype=object),
    }
    made = read(row)
    assert made == {"messages": [USER, calling(call({"jars": [1, 2], "names": ["a", None]}))], "tools": [TOOL]}
    assert json.loads(json.dumps(made)) == made
    array = numpy.array(["text", "text"])
    for key, value, reason in (
        ("content", [{"type": array, "text": "x"}], "not_text_part"),
        ("weight", array, "bad_train_flag"),
        ("role", array, "unknown_role"),
        ("thinking", array, "not_text"),
        ("tool_calls", array, "bad_tool_call"),
    ):
        assert refused({"messages": [USER, {**ASSISTANT, key: value}]})[0] == reason
    assert messages({"conversation": ({"input": "Which shelf?", "output": "Shelf two."},)}) == PAIR
    assert refused({"messages": [USER, calling(call({"jar": b"x"}))]}) == (
        "not_json",
        "message 1 has b'x' (bytes), which JSON does not know",
    )


def test_depth_has_an_end() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    assert refused({"messages": [USER, calling(call({"a": deep}))]})[0] == "too_deep"
    assert refused({"messages": PAIR, "tools": [{"a": deep}]})[0] == "too_deep"
    assert refused({"messages": "[" * 100_000})[0] == "not_messages"


def test_a_reason_survives_pickling() -> None:
    bad = pickle.loads(pickle.dumps(BadRow("empty", "there is nothing")))
    assert (bad.reason, bad.text, str(bad)) == ("empty", "there is nothing", "there is nothing")


WORDS = [
    "user",
    "Human",
    "gpt",
    "assistant",
    "system",
    "tool",
    "function_call",
    "narrator",
    "",
    " ",
    "x\0",
    HALF,
    "null",
]
WORDS += ["[]", "{}", "[{}]", '{"name": "f", "arguments": {"a": null}}', json.dumps(PAIR), "🫙", "text", "[" * 3000]
KEYS = "role from content value tool_calls function_call function name arguments id type text weight train training"
KEYS += " reasoning thinking tool_call_id input output " + HALF
COLUMNS = "messages conversations conversation prompt completion response instruction input output history question"
COLUMNS += " answer text system tools other\n"


def any_json(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(4 if depth > 4 else 7)
    if kind < 2:
        return chance.choice(WORDS)
    if kind < 4:
        return chance.choice([None, True, False, 0, 1, -7, 0.5, float("nan"), 1e308, 10**40])
    if kind == 4:
        return [any_json(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {key: any_json(chance, depth + 1) for key in chance.sample(KEYS.split(), chance.randrange(5))}


def any_messages(chance: random.Random) -> dict[str, Any]:
    """Messages that are whole in themselves, in any order."""
    result, off = {"role": "tool", "content": "2"}, {**ASSISTANT, "weight": chance.choice([0, 1, 2])}
    whole = [SYSTEM, USER, ASSISTANT, off, result, calling(call({"a": 1})), {**USER, "weight": chance.choice([0, 1])}]
    return {"messages": [chance.choice(whole) for _ in range(chance.randrange(7))]}


def near_miss(chance: random.Random) -> Any:
    """A good row in which something is put in another's place."""
    row = copy.deepcopy(
        chance.choice(
            [
                {"messages": [SYSTEM, USER, calling(call({"a": 1})), {"role": "tool", "content": "2"}, ASSISTANT]},
                {"messages": [USER, ASSISTANT, USER, {**ASSISTANT, "weight": 0}, *PAIR], "tools": [TOOL]},
                {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
                {"conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]},
                {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
                {"prompt": [USER], "completion": [ASSISTANT]},
            ]
        )
    )
    for _ in range(chance.randrange(3)):
        place: Any = row
        while True:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or not place[key] or chance.random() < 0.2:
                break
            place = place[key]
        place[key] = any_json(chance, 3)
    return row


def any_row(chance: random.Random) -> Any:
    if chance.random() < 0.7:
        return chance.choice([near_miss, any_messages])(chance)
    if chance.random() < 0.05:
        return any_json(chance)
    return {column: any_json(chance) for column in chance.sample(COLUMNS.split(" "), chance.randrange(5))}


@pytest.mark.parametrize("seed", range(8))
def test_no_value_brings_another_exception(seed: int) -> None:
    chance, kept, reasons = random.Random(seed), 0, Counter[str]()
    for _ in range(2000):
        row = any_row(chance)
        before = repr(row)
        section = DatasetSection(
            shape=chance.choice(SHAPES) if chance.random() < 0.1 else "auto",
            on_late_system=chance.choice(["keep", "drop"]),
            on_repeated_role=chance.choice(["merge", "drop"]),
            on_assistant_first=chance.choice(["keep", "drop"]),
        )
        made = outcome(row, section)
        if isinstance(made, BadRow):
            reasons[made.reason] += 1
            assert made.text.encode()
            assert "\n" not in made.text
            assert len(made.text) < 600
        else:
            kept += 1
            assert_plain(made, section)
        assert repr(row) == before, "the row was changed"
    assert kept > 100
    assert len(reasons) > 18


def outcome(row: Any, section: DatasetSection) -> dict[str, Any] | BadRow:
    try:
        return normalise(row, section, Counter())[1]
    except BadRow as bad:
        return bad


def assert_plain(row: dict[str, Any], section: DatasetSection) -> None:
    """It can be written, and it comes out unchanged when it is read again."""
    json.dumps(row, ensure_ascii=False, sort_keys=True).encode()
    if "text" in row:
        assert row["text"].strip()
        return
    assert set(row) <= {"messages", "tools"}
    assert row["messages"][-1]["role"] == "assistant"
    for message in row["messages"]:
        assert message["role"] in ("system", "user", "assistant", "tool")
        assert isinstance(message["content"], str) or message["tool_calls"]
        assert message.get("train", False) is False
    if "null" not in json.dumps(row).replace('"content": null', ""):
        _, again = normalise(row, section.model_copy(update={"shape": "messages"}), Counter())
        assert repr(again) == repr(row)


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, finetuning.shapes; print(sorted({'numpy', 'torch', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, text=True, capture_output=True, check=True)
    assert found.stdout == "[]\n"
