"""The whole flow on the embedded example, as `make finetune` runs it: learned, saved, registered, loaded, answered."""

import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from finetuning.artifacts import damaged_files, read_json, read_manifest
from tests.conftest import PROJECT, Place, make_place, run_module


class Run:
    """What one run of the flow left behind."""

    def __init__(self, place: Place, output: str):
        self.place, self.output = place, output
        self.root = place.root

    def only(self, pattern: str) -> Path:
        [found] = [path for path in self.root.glob(pattern) if not path.name.startswith(".")]
        return found


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run in a place of its own, with the temporary Prefect server of a newcomer."""
    place = make_place(tmp_path_factory.mktemp("smoke"))
    often = {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1"}  # it takes seconds; MLflow's own is ten of them
    result = run_module("flows.finetune", "smoke", **place.environment, **clean_environment(place), **often)
    assert result.returncode == 0, result.stdout + result.stderr
    return Run(place, result.stdout + result.stderr)


def clean_environment(place: Place) -> dict[str, str]:
    """Undo what `apply_environment` did to the test process: this run has a storage root of its own."""
    from config.settings import Settings

    environment = Settings(storage_root=place.root, mlflow_tracking_uri=None, mlflow_registry_uri=None).environment()
    return {**environment, "HF_HOME": str(place.root / "huggingface")}


def test_it_learns(smoke: Run) -> None:
    shares = re.findall(r"^(base|candidate): .*questions answered exactly: \d+ \((\d+)%\)", smoke.output, re.MULTILINE)
    found = {model: int(share) for model, share in shares}
    assert found["base"] == 0
    assert found["candidate"] > 90
    stopped = re.findall(r"end by themselves: (\d+)%", smoke.output)
    assert int(stopped[-1]) > 90


def test_the_output_is_for_people(smoke: Run) -> None:
    assert "Traceback" not in smoke.output
    assert "registered as main.default.smoke version 1" in smoke.output
    verdict = r"^verdict: champion: loss [\d.]+ against [\d.]+ of the base model on \d+ rows"
    assert re.search(verdict, smoke.output, flags=re.MULTILINE)
    assert re.search(r"step \d+ of \d+ .*loss .*tokens/s .*s to go", smoke.output)
    assert "training.max_length = 256  (recipe smoke)" in smoke.output


def test_these_folders_and_no_others(smoke: Run) -> None:
    assert {path.name for path in smoke.root.iterdir()} <= {
        "cache", "datasets", "evaluations", "huggingface", "mlflow", "model-directories", "models", "outcomes",
        "prefect", "prefect-results", "registrations", "runs", "tmp", "tokens", "trainings", "volumes",
    }  # fmt: skip
    assert not list(smoke.place.home.iterdir()), "something was written to the home folder"
    assert not [path for path in (smoke.root / "tmp").iterdir() if path.is_dir() and any(path.iterdir())]
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=PROJECT, text=True, capture_output=True).stdout
    assert not re.search(r"^\?\? (mlruns|mlflow|trainer_output|.*\.db)", dirty, flags=re.MULTILINE)


def test_others_may_read_the_model_and_write_nothing(smoke: Run) -> None:
    paths = [path for path in smoke.root.rglob("*") if not path.is_symlink()]
    assert [path for path in paths if path.stat().st_mode & 0o022] == []
    published = smoke.only("volumes/main/default/checkpoints/smoke/*")
    assert {oct(path.stat().st_mode & 0o777) for path in published.iterdir()} == {"0o644"}


def test_the_model_directory_is_complete_and_published(smoke: Run) -> None:
    directory = smoke.only("model-directories/*")
    published = smoke.only("volumes/main/default/checkpoints/smoke/*")
    assert published.name == directory.name
    assert read_manifest(published) == read_manifest(directory)
    assert damaged_files(published) == []
    assert {path.name for path in published.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "curves.png", "finetune.json",
        "generation_config.json", "manifest.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    provenance = read_json(published / "finetune.json")
    assert provenance["config"]["training"]["max_length"] == 256
    assert provenance["origins"]["training.max_length"] == "recipe smoke"
    assert str(published) in smoke.output


def test_only_whole_checkpoints_are_kept(smoke: Run) -> None:
    training = smoke.only("trainings/*")
    checkpoints = sorted((training / "checkpoints").glob("*checkpoint-*"))
    assert 1 <= len(checkpoints) <= 2
    for checkpoint in checkpoints:
        assert damaged_files(checkpoint) == []
    assert (training / "checkpoints" / read_json(training / "training.json")["result"]["checkpoint"]) in checkpoints


def test_one_finished_run_with_everything(smoke: Run) -> None:
    client = mlflow_client(smoke)
    [experiment] = client.search_experiments(filter_string="name = 'finetune'")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "model_full-fine-tuning"
    assert run.data.params["training.learning_rate"] == str(
        read_json(smoke.only("runs/*"))["config"]["training"]["learning_rate"]
    )
    assert set(run.data.params) == set(read_json(smoke.only("runs/*"))["origins"])
    assert {"loss", "eval_loss", "learning_rate", "grad_norm"} <= set(run.data.metrics)
    assert any(name.startswith("system/") for name in run.data.metrics)
    [dataset] = run.inputs.dataset_inputs
    assert dataset.dataset.digest == smoke.only("datasets/*").name
    assert {file.path for file in client.list_artifacts(run.info.run_id)} >= {"config.json"}
    assert experiment.artifact_location.startswith("file:///")
    assert str(smoke.root) in experiment.artifact_location


def test_one_version_that_loads_and_answers(smoke: Run) -> None:
    """In a fresh process, through pyfunc, as whoever serves it."""
    client = mlflow_client(smoke)
    [version] = client.search_model_versions("name = 'main.default.smoke'")
    assert version.status == "READY"
    [row] = [json.loads(line) for line in (smoke.only("datasets/*") / "test.jsonl").open()][:1]
    code = f"""
import json, mlflow
mlflow.set_tracking_uri({tracking_uri(smoke)!r})
mlflow.set_registry_uri({tracking_uri(smoke)!r})
model = mlflow.pyfunc.load_model("models:/main.default.smoke/{version.version}")
print("ANSWER", json.dumps(model.predict({{"messages": {row["messages"][:-1]!r}, "max_tokens": 40}})))
print("METADATA", json.dumps(model.metadata.metadata))
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, text=True, capture_output=True, check=True, cwd=smoke.root)
    answer = json.loads(re.search(r"^ANSWER (.*)$", result.stdout, flags=re.MULTILINE).group(1))
    answer = answer[0] if isinstance(answer, list) else answer
    [choice] = answer["choices"]
    assert row["messages"][-1]["content"] in choice["message"]["content"]
    metadata = json.loads(re.search(r"^METADATA (.*)$", result.stdout, flags=re.MULTILINE).group(1))
    assert metadata["task"] == "llm/v1/chat"
    assert metadata["databricks_model_family"] == "Qwen3ForCausalLM"
    assert metadata["pretrained_model_name"] == "samples/model"
    assert metadata["databricks_model_size_parameters"].endswith("k")


def test_the_version_is_proven_and_is_the_champion(smoke: Run) -> None:
    client = mlflow_client(smoke)
    version = client.get_model_version_by_alias("main.default.smoke", "champion")
    assert version.tags["finetune_proof"].startswith("passed ")
    assert version.tags["finetune_verdict"].startswith("champion: loss ")
    assert version.tags["dataset_version"] == read_json(smoke.only("runs/*"))["inputs"]["dataset"]["version"]
    assert version.tags["recipe"] == "smoke"
    assert {"libraries", "seed", "num_tokens", "total_flos", "gpu_hours", "license"} <= set(version.tags)
    assert not any(re.search(r"[.,=/:-]", key) for key in version.tags), "Unity Catalog refuses such keys"
    run = client.get_run(version.run_id)
    proof = json.loads(client_text(client, run.info.run_id, "proof.json"))
    assert len(proof["answers"]) == 4
    assert any(answer["stopped"] for answer in proof["answers"])
    assert abs(proof["loss_minus_trained_weights"]) < 0.05
    assert all(answer["answer"] for answer in proof["pyfunc"])


def test_the_report_is_in_prefect_and_with_the_mlflow_run(smoke: Run) -> None:
    made, verdict = artifacts(smoke), "champion: main.default.smoke version 1"
    report = made["report"].replace("\\", "")
    assert report.splitlines()[0] == f"# {verdict}"
    assert "python -m flows.finetune smoke\n" in report
    for step in ("preflight", "load_and_split", "tokenize", "train", "evaluate", "register", "prove_and_promote"):
        assert re.search(rf"^\| {step} \| \d", report, flags=re.MULTILINE), step
    assert made["loss-curve"].startswith("data:image/png;base64,")
    assert f"mlflow ui --backend-store-uri {tracking_uri(smoke)}" in made["mlflow-run"]
    assert str(smoke.only("trainings/*") / "checkpoints") in made["checkpoints"]
    assert "smoke version 1" in made["registered-version"]
    assert made["training-smoke"] == 100.0
    client = mlflow_client(smoke)
    run_id = client.get_model_version_by_alias("main.default.smoke", "champion").run_id
    assert f"<h1>{verdict}</h1>" in client_text(client, run_id, "report/report.html")
    assert "report/curve.png" in {file.path for file in client.list_artifacts(run_id, "report")}


def artifacts(run: Run) -> dict[str, Any]:
    """Key -> content of what the run shows in the Prefect UI, from the database of its temporary server."""
    with sqlite3.connect(run.root / "prefect" / "prefect.db") as database:
        rows = database.execute("select key, data from artifact where key is not null order by created").fetchall()
    return {key: json.loads(str(data)) for key, data in rows}  # a number comes as one


def test_the_card_says_what_it_is(smoke: Run) -> None:
    from huggingface_hub import ModelCard

    card = ModelCard.load(smoke.only("model-directories/*") / "README.md")
    assert card.data.base_model == "samples/model"
    assert card.data.license == "apache-2.0"
    assert "| Recipe | smoke |" in card.text
    assert "| Answers equal to the reference | 0% | 100% |" in card.text
    assert "curves.png" in card.text


def test_again_it_makes_nothing_new(smoke: Run) -> None:
    before = snapshot(smoke.root)
    result = run_module("flows.finetune", "smoke", **smoke.place.environment, **clean_environment(smoke.place))
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert "nothing to do: main.default.smoke version 1 (champion then) comes from the same model" in output
    assert "load_and_split" not in output
    assert snapshot(smoke.root) == before
    client = mlflow_client(smoke)
    assert len(client.search_runs([client.get_experiment_by_name("finetune").experiment_id])) == 1
    assert len(client.search_model_versions("name = 'main.default.smoke'")) == 1


def test_registering_by_hand_finds_the_version_or_makes_another_model(smoke: Run) -> None:
    directory = str(smoke.only("model-directories/*"))
    environment = {**smoke.place.environment, **clean_environment(smoke.place)}
    again = run_module("finetuning.register", directory, **environment)
    assert again.stdout.strip().endswith("main.default.smoke version 1 (there already)"), again.stderr
    other = run_module("finetuning.register", directory, "--registry.model_name", "by_hand", **environment)
    assert other.stdout.strip().endswith("main.default.by_hand version 1 (new)"), other.stderr


def test_a_registration_that_dies_is_tried_again_and_nothing_else_is(smoke: Run) -> None:
    before = snapshot(smoke.root)
    once = smoke.root.with_name("registration-died")
    fault = {"step": "register", "opens": "/MLmodel$", "do": "kill -9 $SELF", "after": 0, "once": str(once)}
    inject = {"FAULT": json.dumps(fault), "PYTHONPATH": str(PROJECT / "bench" / "inject")}
    environment = {**smoke.place.environment, **clean_environment(smoke.place), **inject}
    result = run_module("flows.finetune", "smoke", "--registry.model_name", "tried_again", **environment)
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert once.exists()
    assert "the step 'register' was ended by signal SIGKILL" in output
    assert "registered as main.default.tried_again version 1" in output
    assert output.count("this training is finished: its checkpoint") == 1
    assert re.search(r"load_and_split.*Cached", output)
    assert re.search(r"prepare_model.*Cached", output)
    assert len(mlflow_client(smoke).search_model_versions("name = 'main.default.tried_again'")) == 1
    assert {path: when for path, when in snapshot(smoke.root).items() if "/tried_again/" not in path} == before


def snapshot(root: Path) -> dict[str, int]:
    """Path -> time of change of everything that must not be made again."""
    folders = ("datasets", "models", "tokens", "model-directories", "evaluations", "volumes", "trainings/*/checkpoints")
    files = (path for folder in folders for top in root.glob(folder) for path in top.rglob("*") if path.is_file())
    return {str(path): path.stat().st_mtime_ns for path in files if not path.name.endswith(".lock")}


def client_text(client, run_id: str, path: str) -> str:
    return Path(client.download_artifacts(run_id, path)).read_text()


def tracking_uri(run: Run) -> str:
    return f"sqlite:///{run.root}/mlflow/mlflow.db"


def mlflow_client(run: Run):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri(run), tracking_uri(run))
