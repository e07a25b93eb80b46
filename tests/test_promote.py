"""A registered version is proven, judged, promoted, taken back: a real registry, the tiny model."""

import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from config.sections import GateSection, TrainingSection
from config.settings import Settings
from finetuning import aliases, champion, promote, proof
from finetuning.artifacts import write_json, write_manifest
from finetuning.errors import Failure
from finetuning.export import PROVENANCE
from finetuning.lineage import LINEAGE
from finetuning.model import load_tokenizer
from finetuning.packaging import CHAT_TASK, package_model
from finetuning.registry import Registry, register_version
from tests.conftest import PROJECT
from tests.test_data import conversation, write_jsonl
from tests.test_gate import evaluation, spread
from tests.test_packaging import METADATA

SAMPLE = PROJECT / "samples" / "model"


class Shop:
    """A registry of its own, and what the steps before a promotion leave behind."""

    def __init__(self, folder: Path):
        self.folder, self.name = folder, "main.default.lamp"
        self.uri = f"sqlite:///{folder}/mlflow.db"
        self.registry = Registry(self.uri)
        self.rows = write_jsonl(folder / "test.jsonl", [conversation(number) for number in range(40)])
        self.directory = self.model_directory("first")

    def model_directory(self, fingerprint: str) -> Path:
        """The sample model, in bfloat16, as `finetuning.export` writes it; the name makes it another one."""
        from transformers import AutoModelForCausalLM

        directory = self.folder / "model-directories" / fingerprint
        model = AutoModelForCausalLM.from_pretrained(SAMPLE, dtype="bfloat16")
        model.save_pretrained(directory)
        load_tokenizer(SAMPLE, _model_section())[0].save_pretrained(directory)
        shutil.copyfile(SAMPLE / "generation_config.json", directory / "generation_config.json")
        known = {"libraries": {}, "config": {"training": {"seed": 1}}}
        write_json(directory / PROVENANCE, {**dict.fromkeys(LINEAGE), **known, "dataset": fingerprint})
        write_manifest(directory, fingerprint=fingerprint)
        return directory

    def register(self, directory: Path) -> str:
        import mlflow

        mlflow.set_tracking_uri(self.uri)
        client = mlflow.MlflowClient(self.uri)
        experiment = client.get_experiment_by_name("lamp")
        location = (self.folder / "artifacts").as_uri()
        experiment_id = experiment.experiment_id if experiment else client.create_experiment("lamp", location)
        self.run_id = client.create_run(experiment_id).info.run_id
        package = self.folder / f"package-{directory.name}"
        if not package.is_dir():
            package_model(directory, package, task=CHAT_TASK, metadata=METADATA)
        return register_version(
            package, name=self.name, run_id=self.run_id, fingerprint=directory.name, tracking_uri=self.uri,
            registry_uri=self.uri, tags={}, description="",
        ).version  # fmt: skip

    def proof_job(self, number: str, directory: Path | None = None) -> dict[str, Any]:
        return {
            "name": self.name, "number": number,
            "model_directory": directory or self.directory, "checkpoint": SAMPLE, "model": directory or self.directory,
            "rows": self.rows, "training": TrainingSection(max_length=64), "trust_remote_code": False,
        }  # fmt: skip

    def promote(self, number: str, better: float = 0.5, section: dict | None = None, **found: Any) -> dict[str, Any]:
        """With a candidate that is so much better than its reference."""
        folder = self.folder / f"evaluations-{len(list(self.folder.iterdir()))}"
        models = {
            "base": evaluation(folder / "base", spread(3.0)),
            "champion": evaluation(folder / "champion", spread(3.0)),
            "candidate": evaluation(folder / "candidate", spread(3.0 - better)),
        }
        held = self.registry.by_alias(self.name, "champion")
        given = {
            "scores": {name: scores for name, (_, scores) in models.items()},
            "artifacts": {name: str(path) for name, (path, _) in models.items()},
            "champion": held and held.number, "problem": None, **found,
        }  # fmt: skip
        gate = GateSection(**(section or {}))
        return promote.run(
            {"proof": self.proof_job(number), "gate": gate, "evaluation": given, "mlflow_run_id": self.run_id}
        )

    def version(self, number: str) -> Any:
        return next(version for version in self.registry.versions(self.name) if version.number == number)


def _model_section() -> Any:
    from config.sections import ModelSection

    return ModelSection()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    shop = Shop(tmp_path)
    monkeypatch.setenv("FINETUNE_STORAGE_ROOT", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shop.uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", shop.uri)
    (tmp_path / "tmp").mkdir()
    assert Settings().registry_uri == shop.uri
    return shop


@pytest.fixture
def proven(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """Where the proof itself is not what is tested, it is believed."""
    monkeypatch.setattr(proof, "prove", lambda job: {})
    return shop


def test_a_version_is_proven_by_what_the_registry_gives_back(shop: Shop) -> None:
    number = shop.register(shop.directory)
    facts = proof.prove(proof.Job.model_validate(shop.proof_job(number)))
    assert facts["files"] == len([path for path in shop.directory.iterdir() if path.name != "manifest.json"])
    assert 0 < facts["largest_distance_of_a_logit_to_trained_weights"] < 0.2, "bfloat16 against float32"
    assert abs(facts["loss_minus_trained_weights"]) < 0.05
    assert [set(answer) for answer in facts["pyfunc"]] == [{"question", "answer"}] * 2
    assert any(answer["stopped"] for answer in facts["answers"])


def mlflow_run(shop: Shop) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(shop.uri).get_run(shop.run_id)


def stored(shop: Shop, name: str) -> Path:
    [path] = (shop.folder / "artifacts").glob(f"**/model/{name}")
    return path


def test_other_weights_are_never_an_alias(shop: Shop) -> None:
    number = shop.register(shop.directory)
    weights = stored(shop, "model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()  # a hard link would change the model directory as well
    weights.write_bytes(content)
    with pytest.raises(Failure, match=r"version 1 is registered, but not what was trained: it differs .*safetensors"):
        shop.promote(number)
    assert shop.version(number).aliases == ()
    assert proof.PROVEN not in shop.version(number).labels


@pytest.mark.parametrize("name", ["chat_template.jinja", "generation_config.json"])
def test_a_version_that_lost_a_file_is_refused(shop: Shop, name: str) -> None:
    number = shop.register(shop.directory)
    stored(shop, name).unlink()
    with pytest.raises(Failure, match=f"it differs from .* in {re.escape(name)}"):
        shop.promote(number)


def test_a_model_that_never_stops_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    number = shop.register(shop.directory)
    monkeypatch.setattr(proof, "MAX_NEW_TOKENS", 1)
    with pytest.raises(Failure, match="none of 4 answers ended by itself within 1 tokens"):
        shop.promote(number)


def test_passing_makes_the_champion_and_the_next_one_must_be_better(proven: Shop) -> None:
    first = proven.register(proven.directory)
    assert proven.promote(first)["outcome"] == "champion"
    assert proven.version(first).aliases == ("champion",)
    run = mlflow_run(proven)
    assert (run.data.tags["dataset"], run.data.metrics["candidate_loss"]) == ("first", pytest.approx(2.5, abs=0.01))
    assert proven.promote(first)["reason"] == "it is the champion already"

    second = proven.register(proven.model_directory("second"))
    verdict = proven.promote(second, better=-0.5)
    assert verdict["outcome"] == "challenger"
    assert f"To promote it anyway: python -m finetuning.register promote {proven.name} 2" in verdict["reason"]
    assert (proven.version(first).aliases, proven.version(second).aliases) == (("champion",), ("challenger",))
    assert (
        proven.version(second).labels[promote.VERDICT].startswith("challenger: failed: loss 3.5 against 3 of champion")
    )

    assert proven.promote(second, better=0.5)["outcome"] == "champion"
    assert (proven.version(first).aliases, proven.version(second).aliases) == ((), ("champion",))
    assert proven.version(second).labels[promote.PREVIOUS] == first


def test_where_a_person_is_asked_it_waits(proven: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    number = proven.register(proven.directory)
    verdict = proven.promote(number, section={"approval": True})
    assert verdict["outcome"] == "awaiting approval"
    assert proven.version(number).aliases == ("challenger",)
    aliases.main(["promote", proven.name, number])
    assert capsys.readouterr().out == f"{proven.name} version {number} is the champion now\n"
    assert proven.version(number).aliases == ("champion",)


def test_what_a_person_took_back_is_not_promoted_again(proven: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (proven.register(directory) for directory in (proven.directory, proven.model_directory("second")))
    for number in (first, second):
        assert proven.promote(number)["outcome"] == "champion"
    aliases.main(["rollback", proven.name])
    assert "version 1 is the champion again, in place of version 2" in capsys.readouterr().out
    verdict = proven.promote(second)
    assert (verdict["outcome"], "it was rolled back by hand" in verdict["reason"]) == ("challenger", True)
    aliases.main(["promote", proven.name, second])
    assert proven.version(second).aliases == ("champion",)
    aliases.main(["list", proven.name])
    rows = capsys.readouterr().out.splitlines()[1:]
    assert re.match(r"version +status +aliases +fingerprint +proof +verdict", rows[0])
    assert re.match(r"2 +READY +champion +second +passed .* champion: promoted by hand", rows[1])


def test_people_are_told_what_cannot_be(shop: Shop) -> None:
    number = shop.register(shop.directory)
    for arguments, said in {
        ("rollback", shop.name): "has no champion",
        ("promote", shop.name, number): "was never proven",
        ("promote", shop.name, "9"): "has no version '9'. It has: 1.",
        ("list", "main.default.nothing"): "main.default.nothing has no version in sqlite",
    }.items():
        with pytest.raises(SystemExit, match=re.escape(said)):
            aliases.main(list(arguments))
    with pytest.raises(SystemExit) as usage:
        aliases.main(["demote", shop.name])
    assert usage.value.code == 2


def test_a_champion_that_changed_in_the_meantime_is_not_replaced(proven: Shop) -> None:
    first, second = (proven.register(directory) for directory in (proven.directory, proven.model_directory("second")))
    proven.promote(first)
    verdict = proven.promote(second, champion=None)
    assert verdict["outcome"] == "challenger"
    assert "the champion is version 1 meanwhile, which it was not compared with. Run again" in verdict["reason"]


def test_a_champion_is_found_with_its_files_or_downloaded(proven: Shop) -> None:
    assert champion.find(proven.name) is None
    number = proven.register(proven.directory)
    proven.promote(number)
    holder = champion.find(proven.name)
    assert holder == (proven.name, number, "first")
    with champion.model_directory(holder) as directory:
        assert directory == proven.directory
    shutil.rmtree(proven.directory)
    with champion.model_directory(holder) as directory:
        assert (directory / "model.safetensors").is_file()
        assert directory.is_relative_to(proven.folder / "tmp")
    assert not any((proven.folder / "tmp").iterdir())


def test_a_champion_of_another_kind_is_told_and_not_replaced(proven: Shop) -> None:
    """A version that this pipeline did not make and that transformers cannot load."""
    from config.sections import EvaluationSection
    from finetuning import evaluate

    number = proven.register(proven.directory)
    proven.registry.set_alias(proven.name, "champion", number)
    with sqlite3.connect(proven.folder / "mlflow.db") as connection:
        connection.execute("DELETE FROM model_version_tags")
    stored(proven, "config.json").write_text(json.dumps({"model_type": "of tomorrow"}))
    models = {
        name: {"fingerprint": name, "weights": proven.directory, "prepared": proven.directory}
        for name in ("base", "candidate")
    }
    result = evaluate.run(
        {
            "models": models, "registered_model_name": proven.name, "evaluations": proven.folder / "evaluations",
            "rows": proven.rows, "rows_fingerprint": "r", "training": TrainingSection(max_length=64),
            "section": EvaluationSection(loss_rows=4, sample_rows=0), "trust_remote_code": False,
        }
    )  # fmt: skip
    assert result["champion"] == number
    assert result["problem"].startswith("champion version 1 cannot be evaluated: ")
    assert set(result["scores"]) == {"base", "candidate"}
    assert result["scores"]["base"] == result["scores"]["candidate"]
