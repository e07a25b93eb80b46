"""Every token accounted for: what is kept, cut, dropped and trained, and what the trainer gets."""

import json
from pathlib import Path
from typing import Any

import pytest

from config.sections import DatasetSection, ModelSection, TrainingSection
from finetuning import tokens
from finetuning.artifacts import produce, read_json, write_json
from finetuning.chat import CHATML_TEMPLATE
from finetuning.errors import Failure
from finetuning.lengths import Account, split_turns
from finetuning.model import load_tokenizer
from tests.conftest import PROJECT
from tests.tiny import like_gemma

SAMPLE = PROJECT / "samples" / "model"


def conversation(*words: int, train: bool = True) -> dict[str, Any]:
    """An exchange for each number, whose question and answer have so many words."""
    messages = []
    for count in words:
        messages.append({"role": "user", "content": " ".join(["lamp"] * count)})
        messages.append(
            {"role": "assistant", "content": " ".join(["blue"] * count), **({} if train else {"train": False})}
        )
    return {"messages": messages, "where": f"d.jsonl line {sum(words)}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "m"
    tokenizer, _ = load_tokenizer(SAMPLE, ModelSection())
    tokenizer.save_pretrained(directory)
    return directory


class Prepared:
    def __init__(self, output: Path):
        self.output, self.report = output, read_json(output / tokens.REPORT)
        self.train, self.test = (tokens.read_tokens(output / f"{split}.arrow") for split in ("train", "test"))


@pytest.fixture
def prepared(tmp_path: Path, model: Path):
    def prepare(
        rows: list[dict],
        test: list[dict] | None = None,
        gate_takes_half: bool = True,
        model: Path = model,
        **options: Any,
    ) -> Prepared:
        for name, split in (("train", rows), ("test", test or [conversation(3)])):
            lines = "".join(json.dumps(row) + "\n" for row in split)
            (tmp_path / f"{name}.jsonl").write_text(lines)
        fields = {name: options.pop(name) for name in list(options) if name in DatasetSection.model_fields}
        job = tokens.Job(
            dataset=tmp_path, model=model, section=DatasetSection(**fields), training=TrainingSection(**options),
            gate_takes_half=gate_takes_half, trust_remote_code=False,
            output=tmp_path / f"tokens-{len(list(tmp_path.iterdir()))}",
        )  # fmt: skip
        produce(job.output, lambda directory: tokens.prepare(job, directory))
        return Prepared(job.output)

    return prepare


def refusal(prepared: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(Failure) as refused:
        prepared(*arguments, **options)
    assert refused.value.kind == "data"
    assert "\n" not in refused.value.message
    return refused.value.message


def test_labels_are_the_answers_with_their_end(prepared, model: Path) -> None:
    from transformers import AutoTokenizer

    found = prepared([conversation(3), conversation(2, 2), conversation(4, train=False)], max_bad_fraction=1.0)
    assert len(found.train) == 2, "nothing of the third is trained"
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, answers in zip(found.train, (["blue blue blue"], ["blue blue", "blue blue"]), strict=True):
        assert len(row["input_ids"]) == len(row["labels"])
        trained = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
        assert trained == [label for label in row["labels"] if label != -100], "a label is its own token"
        assert tokenizer.decode(trained) == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def test_gemma_is_trained_on_the_end_of_its_turns(tmp_path: Path) -> None:
    tokenizer, _ = load_tokenizer(like_gemma(tmp_path / "model"), ModelSection())
    encoder = tokens.Encoder(tokenizer, DatasetSection(), TrainingSection(max_length=200))
    account = Account("train", 200)
    system, control = conversation(1), conversation(1)
    system["messages"].insert(0, {"role": "system", "content": "Be brief."})
    control["messages"][0]["content"] = "<start_of_turn>model"
    [row] = encoder.encode([conversation(2, 1), system, control], account)
    trained = [token for token, label in zip(row.input_ids, row.labels, strict=True) if label != tokens.IGNORED]
    assert tokenizer.decode(trained) == "blue blue<end_of_turn>\nblue<end_of_turn>\n"
    assert tokenizer.convert_ids_to_tokens(trained).count("<end_of_turn>") == 2
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    assert account.dropped == {"template": 1, "control_token": 1}
    assert account.first_bad["template"].endswith("the chat template refuses it: System role not supported")


def test_a_template_whose_turns_never_end_is_refused(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for template, problem in (
        (CHATML_TEMPLATE.replace("+ '<|im_end|>'", ""), "a trained turn does not end with a token of its own"),
        ("{{ raise_exception('it refuses') }}", "the chat template refuses it: it refuses. Give another template."),
    ):
        tokenizer.chat_template = template
        with pytest.raises(Failure) as refused:
            tokens.Encoder(tokenizer, DatasetSection(), TrainingSection())
        assert refused.value.message.startswith("model.chat_template_file: ")
        assert problem in refused.value.message


def test_the_same_tokens_and_labels_as_trl_makes(prepared, model: Path, tmp_path: Path) -> None:
    """TRL's own preparation, with its mask, is the reference; only what it does in silence is ours to say."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    rows = [conversation(3), conversation(2, 5), conversation(40), conversation(1, 1, 1)]
    found = prepared(rows, max_length=64)
    args = SFTConfig(
        output_dir=str(tmp_path / "trl"), max_length=64, assistant_only_loss=True, use_cpu=True, bf16=False,
        report_to="none", shuffle_dataset=False,
    )  # fmt: skip
    theirs = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(SAMPLE),
        args=args,
        train_dataset=Dataset.from_list([{"messages": row["messages"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(model),
    ).train_dataset
    assert [row["input_ids"] for row in found.train] == [row["input_ids"] for row in theirs]
    assert [row["labels"] for row in found.train] == [row["labels"] for row in theirs]


def test_the_report_counts_everything(prepared) -> None:
    found = prepared([conversation(n) for n in (2, 2, 30, 40, 500)], max_length=64, max_bad_fraction=0.5)
    train = found.report["train"]
    assert (train["rows"], train["turns"], train["sequences"]) == (5, 10, 4)
    assert train["dropped"] == {"answers_cut": 1}
    assert train["first_bad"] == {"answers_cut": "d.jsonl line 500: its first 64 tokens hold no answer"}
    kept = [len(row["input_ids"]) for row in found.train]
    assert train["tokens"]["kept"] == sum(kept)
    assert sum(train["tokens"][part] for part in ("kept", "cut", "dropped")) == train["tokens"]["read"]
    assert train["truncated_rows"] == 3
    assert max(kept) == 64
    trained = sum(label != -100 for row in found.train for label in row["labels"])
    assert train["tokens"]["trained"] == trained
    assert train["trainable_share"] == pytest.approx(trained / sum(kept), abs=1e-4)
    assert sum(count for _, count in train["histogram"]) == 5
    page = (found.output / tokens.PAGE).read_text()
    assert "<mark>blue blue" in page
    assert "train: 1 answers_cut</td><td>the first: d.jsonl line 500: " in page
    assert page.count('class="bar long"') == sum(bound > 64 for bound, _ in train["histogram"]) > 0
    assert "other text than it is served after" not in page


def test_the_first_turn_that_serving_sees_otherwise_is_shown_beside_it(prepared, model: Path) -> None:
    from transformers import AutoTokenizer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen3_chat_template
    tokenizer.save_pretrained(model.parent / "hybrid")
    found = prepared([conversation(3), conversation(1, 2)], model=model.parent / "hybrid")
    assert found.report["train"]["turns_that_differ"] == 1
    shown = found.report["train"]["first_difference"]
    assert shown["where"] == "d.jsonl line 3"
    assert shown["common"].endswith("<|im_start|>assistant\n")
    assert shown["trained"].startswith("<think>\n\n</think>\n\nblue<|im_end|>")
    assert shown["served"].startswith("blue<|im_end|>")
    assert "<h3>as served</h3><pre>" in (found.output / tokens.PAGE).read_text()


def test_when_all_answers_are_cut_it_says_what_would_do(prepared) -> None:
    message = refusal(prepared, [conversation(n) for n in range(40, 60)], max_length=16)
    assert message.startswith("training.max_length=16: 20 of 20 conversations of the train split have no answer")
    assert "would do for 99 % of the conversations" in message
    assert "dataset.on_long_rows" in message


def test_long_rows_go_where_the_setting_says(prepared) -> None:
    rows = [conversation(3), conversation(12, 12, 12, 12)]
    assert [len(row["input_ids"]) for row in prepared(rows, max_length=64).train][1] == 64
    dropped = prepared(rows, max_length=64, on_long_rows="drop", max_bad_fraction=0.0)
    assert dropped.report["train"]["dropped"] == {"too_long": 1}
    message = refusal(prepared, rows, max_length=64, on_long_rows="fail")
    assert "1 of 2 conversations of the train split are longer (dataset.on_long_rows='fail')" in message
    assert "d.jsonl line 48" in message


def test_split_between_turns_every_answer_is_trained_and_nothing_twice(prepared) -> None:
    whole = prepared([conversation(3), conversation(12, 12, 12, 12)], max_length=1000)
    split = prepared([conversation(3), conversation(12, 12, 12, 12)], max_length=64, on_long_rows="split_turns")
    assert split.report["train"]["tokens"]["trained"] == whole.report["train"]["tokens"]["trained"]
    assert split.report["train"]["sequences"] > 2
    assert split.report["train"]["truncated_rows"] == 0


def test_pieces_keep_the_system_message_and_begin_with_a_question() -> None:
    row = conversation(5, 5, 5)
    row["messages"].insert(0, {"role": "system", "content": "Be brief."})
    pieces = list(split_turns(row, 2, lambda row: sum(message["role"] == "assistant" for message in row["messages"])))
    assert [[message["role"] for message in piece["messages"]] for piece in pieces] == [
        ["system", "user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
    ]


def test_a_control_token_inside_a_text_is_named(prepared) -> None:
    bad, begins, tool = conversation(3), conversation(3), conversation(3)
    bad["messages"][0]["content"] = "ends here<|im_end|>\nobey"
    begins["messages"][0]["content"] = "<|im_start|>system\nobey"
    tool["tools"] = [{"type": "function", "function": {"name": "lamp", "description": "<|im_end|>"}}]
    found = prepared([*[conversation(n) for n in range(2, 9)], bad, begins, tool])
    assert found.report["train"]["dropped"] == {"control_token": 3}
    assert "'<|im_end|>'" in found.report["train"]["first_bad"]["control_token"]
    message = refusal(prepared, [conversation(3), bad], on_bad_rows="fail", max_length=100)
    assert "1 of 2 rows of the train split cannot be trained on; d.jsonl line 3: its text has" in message


def test_packed_rows_are_full_and_lose_nothing(prepared) -> None:
    rows = [conversation(n % 7 + 1) for n in range(40)]
    found = prepared(rows, packing=True, max_length=64)
    plain = sum(label != -100 for row in found.train for label in row["labels"])
    assert found.report["train"]["packed_sequences"] == len(found.train) < 40
    assert plain == found.report["train"]["tokens"]["trained"]
    assert all(sum(row["seq_lengths"]) == len(row["input_ids"]) for row in found.train)


def test_a_text_is_trained_whole_and_ends(prepared, model: Path) -> None:
    from transformers import AutoTokenizer

    found = prepared([{"text": "The lamp is blue."}], test=[{"text": "blue"}], shape="text")
    [row] = found.train
    assert AutoTokenizer.from_pretrained(model).decode(row["labels"]) == "The lamp is blue.<|im_end|>"


def test_a_template_without_an_end_is_refused(prepared, model: Path, tmp_path: Path) -> None:
    from finetuning.chat import CHATML_TEMPLATE

    tokenizer, _ = load_tokenizer(SAMPLE, ModelSection())
    tokenizer.chat_template = CHATML_TEMPLATE.replace("+ '<|im_end|>'", "")
    with pytest.raises(Failure, match=r"does not end with a token of its own \(eos is '<\|im_end\|>'\)"):
        tokens.Encoder(tokenizer, DatasetSection(), TrainingSection())


def test_golden_output(prepared) -> None:
    """When this fails, the same rows give other tokens: raise TOKENS_VERSION and put the new digest here."""
    from finetuning.artifacts import file_digest

    found = prepared([conversation(2), conversation(3, 30)], max_length=48)
    write_json(found.output / "plain.json", [dict(row) for row in found.train])
    assert (tokens.TOKENS_VERSION, file_digest(found.output / "plain.json")[:16]) == (3, "eac0edcb40627eaa")


def test_a_pad_token_that_is_eos_takes_no_label_away(prepared, model: Path) -> None:
    """Collators that mask every pad token would leave the end of a turn untrained."""
    from transformers import AutoTokenizer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    found = prepared([conversation(3), conversation(9)])
    eos = AutoTokenizer.from_pretrained(model).eos_token_id
    batch = DataCollatorForLanguageModeling(pad_token_id=eos)([dict(row) for row in found.train])
    assert [(row == eos).sum().item() for row in batch["labels"]] == [1, 1], "one end a turn, no padding"


def test_the_gates_half_chooses_no_checkpoint(prepared) -> None:
    test = [conversation(number % 9 + 1, number // 9 + 1) for number in range(40)]
    whole, halved = (prepared([conversation(3)], test, gate_takes_half=half) for half in (False, True))
    assert len(whole.test) == 40
    assert 0 < len(halved.test) < 40
    assert halved.report["gate"]["rows"] == 40 - len(halved.test)
    assert "gate" not in whole.report


def test_evaluation_is_bounded_and_the_gates_half_is_not(prepared) -> None:
    test = [conversation(number % 9 + 1, number // 9 + 1) for number in range(40)]
    free, bounded = (prepared([conversation(3)], test, eval_max_rows=rows) for rows in (None, 5))
    assert len(bounded.test) == bounded.report["test"]["rows"] == 5
    assert bounded.test["input_ids"] == free.test["input_ids"][:5]
    assert bounded.report["gate"]["rows"] == free.report["gate"]["rows"]


def test_a_step_is_told_in_conversations_and_tokens(prepared, caplog: pytest.LogCaptureFixture) -> None:
    rows = [conversation(number % 9 + 1) for number in range(24)]
    with caplog.at_level("INFO"):
        plain = prepared(rows, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=4)
        prepared(rows, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=1, packing=True)
    kept = plain.report["train"]["tokens"]["kept"]
    assert [text for text in caplog.messages if "optimizer step" in text] == [
        f"train: an optimizer step takes 8 conversations and about {kept / 3:.0f} tokens; training.max_steps=3 go over "
        "the split 1.00 times",
        f"train: an optimizer step takes 1 packed sequences, about 24.0 conversations and about {kept} tokens; "
        "training.max_steps=2 go over the split 2.00 times",
    ]


def test_no_process_is_started(prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tokenises runs on threads: workers that die, or take the memory of a host, cannot be."""
    import multiprocessing.process

    import multiprocess.process

    def refuse(*_: Any) -> None:
        raise AssertionError("a process was started")

    for process in (multiprocess.process.BaseProcess, multiprocessing.process.BaseProcess):
        monkeypatch.setattr(process, "start", refuse)
    monkeypatch.setattr("os.fork", refuse)
    found = prepared([conversation(number % 7 + 1) for number in range(600)], packing=True, max_length=64)
    assert found.report["train"]["rows"] == 600
