"""The preflight: each of its lines, the table on a real server, and `--plan` on the command line."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from config.cli import parse
from config.recipes import RefusedConfiguration
from config.sections import Config, DatasetSection
from config.settings import Settings
from finetuning import artifacts, estimate, libraries, limits, rights, sample, workload
from finetuning.errors import Failure
from finetuning.findings import CHECKS, Findings, Line
from finetuning.inputs import Input, identify
from finetuning.memory.gpus import Gpu
from tests.conftest import PROJECT, Place, Server, make_place, run_module
from tests.hub import Repository, serve
from tests.registries import faults, unity_catalog
from tests.test_flow import clean_environment
from tests.test_sources import lines

H100 = Gpu("NVIDIA H100 80GB HBM3", 84_900_000_000)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def only(findings: Findings, check: str) -> Line:
    [line] = [line for line in findings.lines if line.check == check]
    return line


def conversation(number: int) -> dict[str, Any]:
    turns = (("user", f"What is {number}?"), ("assistant", f"It is {number}."))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(path: Path, rows: list[dict[str, Any]]) -> DatasetSection:
    path.write_bytes(lines(rows))
    return DatasetSection(name=str(path))


def test_all_that_is_refused_is_told_and_the_kind_is_one_that_stays() -> None:
    findings = Findings()
    with findings.checking("registry"):
        raise Failure("transient", "the registry did not answer")
    assert findings.failure.kind == "transient"
    with findings.checking("dataset"):
        raise Failure("configuration", "dataset.name='x': there is no such file. Give another path.")
    findings.ok("model", "is there")
    assert (findings.failure.kind, findings.failure.message) == (
        "configuration",
        "dataset.name='x': there is no such file. Give another path.\nthe registry did not answer",
    )
    assert [line.check for line in findings.in_order()] == ["dataset", "model", "registry"]
    assert only(findings, "dataset").remedy == "Give another path."
    assert only(findings, "registry").remedy == "It is tried again by itself; run it again when that did not help."
    narrow = findings.text(width=70).splitlines()
    assert max(map(len, narrow)) <= 70
    assert "-> Give another path." in findings.text()


def test_who_is_told_to_stop_stops() -> None:
    with pytest.raises(Failure, match="stop"), Findings().checking("rows"):
        raise Failure("preempted", "told to stop")


@pytest.mark.parametrize(
    ("installed", "result", "found"),
    [
        ({}, "ok", "as tested: torch 2.13.0+cpu, transformers"),
        (
            {"torch": "2.13.1+cu130"},
            "ok",
            "all in their ranges, and not what was tested: torch 2.13.1+cu130 (test",
        ),
        ({"trl": "1.15.9"}, "warning", "not tested: trl 1.15.9 is not <2,>=1.16"),
        ({"torchao": None}, "refused", "not installed: torchao."),
    ],
)
def test_libraries(installed: dict[str, str | None], result: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = dict(re.findall(r"^([\w.-]+)==(\S+)", (PROJECT / "constraints.txt").read_text(), re.MULTILINE))
    versions = {**{name.lower().replace("_", "-"): pin for name, pin in tested.items()}, "torch": "2.13.0+cpu"}
    versions |= installed
    monkeypatch.setattr(libraries, "_installed", lambda name: versions[name.lower()])
    findings = Findings()
    with findings.checking("libraries"):
        libraries.check_libraries(findings)
    line = only(findings, "libraries")
    assert (line.result, line.found[: len(found)]) == (result, found)
    assert result == "ok" or "pip install -c constraints.txt" in line.remedy


def test_libraries_without_the_files_that_name_them(tmp_path: Path) -> None:
    findings = Findings()
    libraries.check_libraries(findings, tmp_path)
    assert only(findings, "libraries").found == f"not compared: {tmp_path}/pyproject.toml is not there"


def test_rows_are_sampled_and_counted(tmp_path: Path) -> None:
    section = write(tmp_path / "train.jsonl", [conversation(number) for number in range(1000)])
    taken = sample.take(section, identify("dataset", section.name, "main"), tmp_path)
    assert (taken.train.num_read, taken.is_whole, taken.num_rows, taken.is_counted) == (300, False, 900, True)
    findings = Findings()
    sample.describe(taken, section, findings)
    assert only(findings, "rows").found == "the first 300 rows: 300 of shape messages; 900 to train on"


def test_rows_that_take_long_to_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "COUNT_SECONDS", 0)
    section = write(tmp_path / "train.jsonl", [conversation(number) for number in range(1000)])
    taken = sample.take(section, identify("dataset", section.name, "main"), tmp_path)
    assert (taken.num_rows, taken.is_counted) == (270, False)
    report = {"tokens": {"kept": 3000}, "sequences": 300, "rows": 300}
    findings, config = Findings(), Config()
    workload.steps(config, workload.workload(config, report, taken.num_rows, "at least"), findings)
    assert only(findings, "steps").found == (
        "50 of 8 conversations and about 80 tokens, in all 4,000 tokens or at most 1.5 epochs of at least 270 "
        "conversations"
    )


def test_bad_rows_of_a_sample(tmp_path: Path) -> None:
    """A share of the first rows decides nothing about all of them; where they are all rows, it does."""
    bad = [{"messages": [{"role": "user", "content": "alone"}]}] * 10
    section = write(tmp_path / "train.jsonl", bad + [conversation(number) for number in range(400)])
    findings = Findings()
    sample.describe(sample.take(section, identify("dataset", section.name, "main"), tmp_path), section, findings)
    line = only(findings, "rows")
    assert line.result == "warning"
    assert "10 cannot be trained on, the first (no_assistant):" in line.found
    assert "train.jsonl line 1: no message has role 'assistant'" in line.found
    assert "dataset.max_bad_fraction=0.02" in line.remedy

    for rows in (bad + [conversation(number) for number in range(40)], bad * 40):
        section = write(tmp_path / "train.jsonl", rows)
        with pytest.raises(Failure, match="cannot be trained on") as refused:
            sample.take(section, identify("dataset", section.name, "main"), tmp_path)
        assert refused.value.kind == "data"


def test_packed_sequences_are_taken_for_full() -> None:
    config = Config.model_validate({"training": {"packing": True, "max_length": 100}})
    report = {"tokens": {"kept": 3000}, "sequences": 300, "rows": 300}
    work = workload.workload(config, report, 1000, "about")  # 10,000 tokens in 100 sequences
    assert (work.tokens_per_step, work.epochs) == (800, 4)
    counted = workload.workload(config, {**report, "packed_sequences": 50}, 300, "exactly")
    assert (counted.tokens_per_step, counted.epochs) == (8 * 60, 8)


def test_memory(tmp_path: Path) -> None:
    shutil.copy(PROJECT / "bench" / "qwen3-4b-config.json", tmp_path / "config.json")

    def told(gpu: Gpu | None, began: bool = False, **training: Any) -> Line:
        findings = Findings()
        workload.memory(Config.model_validate({"training": training}), tmp_path, gpu, began, findings)
        return only(findings, "memory")

    assert told(H100).result == "ok"
    assert re.match(r"[\d.]+ GB of 84.9 GB of NVIDIA H100 80GB HBM3 by the plan, its peak in", told(H100).found)
    small = Gpu("small", 20_000_000_000)
    assert told(small).failure[0] == "out_of_memory"
    assert "Would fit: " in told(small).remedy
    assert told(small, began=True).result == "warning"
    assert told(None).result == "warning"
    assert told(None, bf16=False).result == "ok"
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    assert told(H100).found.startswith("no plan: config.json: model_type='new' is not understood")


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(num_parameters: int, began: bool = False) -> Line:
        findings = Findings()
        workload.disk(Config(), num_parameters, tmp_path / "trainings" / "x", began, findings)
        return only(findings, "disk")

    assert re.fullmatch(r"0.0373 GiB needed at .*, [\d.e+]+ GiB are free", told(1_000_000).found)
    monkeypatch.setattr(limits, "free_bytes", lambda path: 50 * 2**30)
    assert told(4_022_468_096).failure[0] == "out_of_disk"
    assert told(4_022_468_096).remedy.startswith("Free some, lower training.save_total_limit")
    assert told(4_022_468_096, began=True).result == "warning"


def finished_training(root: Path, name: str, model: Input, gpu: str | None, **training: Any) -> None:
    """As `finetuning.train` leaves one, without its weights."""
    directory, prepared = root / "trainings" / name, root / "models" / "prepared"
    for folder in (directory, prepared):
        folder.mkdir(parents=True, exist_ok=True)
    artifacts.write_manifest(prepared, source=model.name, version=model.version)
    config = Config.model_validate({"training": training}).model_dump()
    artifacts.write_json(directory / "job.json", {"config": config, "model": str(prepared)})
    steps = [{"step": step, "tokens_per_second": 1000.0, "step_seconds": 2.0} for step in (10, 20)]
    shares = {"data": 0.1, "forward_backward": 0.6, "optimizer": 0.1, "evaluation": 0.2}
    result = {
        "num_gpus": int(bool(gpu)),
        "gpu": gpu,
        "log_history": [*steps, {"eval_loss": 1.0}],
        "time_shares": shares,
    }
    artifacts.write_json(directory / "training.json", {"result": result})


def test_time_is_that_of_an_earlier_training_or_an_assumption_that_says_so(tmp_path: Path) -> None:
    config, model = Config(), Input(name="m", path=None, version="v")
    trainings = tmp_path / "trainings"
    how = dict(num_parameters=4_022_468_096, num_tokens=400_000, gpu=H100, trainings=trainings)

    unknown = estimate.estimate(config, model, **how | {"gpu": None})
    assert unknown == (None, "no training of this model on a CPU was measured here")
    assumed = estimate.estimate(config, model, **how)
    assert assumed.seconds == pytest.approx(6 * 4_022_468_096 * 400_000 * 4 / 3 / (989e12 * 0.3))
    assert "at an assumed 30% of the peak of 1 NVIDIA H100 80GB HBM3" in assumed.how
    assert "none was measured here" in assumed.how

    finished_training(tmp_path, "cpu", model, None)
    finished_training(tmp_path, "short", model, H100.name, max_length=1024)
    finished_training(tmp_path, "other", model, "NVIDIA H200")
    (trainings / "broken").mkdir()
    (trainings / "broken" / "training.json").write_text("{")
    measured = estimate.estimate(config, model, **how)
    assert measured.seconds == pytest.approx(400_000 / 800)  # a fifth of its time went into evaluations
    assert "measured by training short of" in measured.how
    assert measured.how.endswith(", which had training.max_length=1024")
    finished_training(tmp_path, "same", model, H100.name)
    assert "measured by training same of" in estimate.estimate(config, model, **how).how
    another = Input(name="m", path=None, version="w")
    assert "an assumed 30%" in estimate.estimate(config, another, **how).how


@pytest.mark.parametrize(
    ("price", "cost"),
    [("", "about 1.50 GPU hours of training"), ("3", "about 4.50 for 1.50 GPU hours of training at 3 each")],
)
def test_cost(price: str, cost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_GPU_HOUR_PRICE", price)
    config, model, findings = Config(), Input(name="m", path=None, version="v"), Findings()
    finished_training(tmp_path, "same", model, H100.name)
    work = workload.Workload(800 * 5400 / 50, 1.0, 100, "exactly")
    workload.time_and_cost(config, model, work, None, H100, tmp_path / "trainings" / "new", findings)
    assert only(findings, "time").found.startswith("about 90 min of training: 800 tokens/s on 1 NVIDIA H100")
    assert only(findings, "cost").found == cost


def test_servers_are_only_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, name = f"sqlite:///{tmp_path}/new.db", "main.default.looked_at"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "looked-at")

    def told(only_look: bool) -> list[str]:
        findings = Findings()
        rights.tracking_line(Settings(), only_look, findings)
        rights.registry_line(name, Settings(), only_look, findings)
        return [line.found for line in findings.lines]

    assert told(only_look=True) == [f"{uri} is not there yet: the first run makes it"] * 2
    assert not (tmp_path / "new.db").exists()
    import mlflow

    mlflow.set_tracking_uri(uri)
    mlflow.MlflowClient().create_experiment("another", tmp_path.as_uri())
    tracking, registry = told(only_look=True)
    assert tracking == f"{uri} answers; experiment 'looked-at', which the first run makes; artifacts: not tried"
    assert registry.startswith(f"{name} is not in {uri}; right to create: not proven")
    tracking, registry = told(only_look=False)
    assert tracking == f"{uri}, experiment 'looked-at'; an artifact was written, read and deleted"
    assert registry == f"{name} is in {uri}; right to add versions: not proven"
    assert told(only_look=True)[0] == f"{uri} answers; experiment 'looked-at'; artifacts: not tried"


def test_a_tracking_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    mlflow.set_tracking_uri("http://127.0.0.1:9")
    with pytest.raises(Failure, match=r"cannot be used.*FINETUNE_TRACKING_REQUIRED=false"):
        rights.tracking_line(Settings(), only_look=False, findings=Findings())
    monkeypatch.setenv("FINETUNE_TRACKING_REQUIRED", "false")
    findings = Findings()
    rights.tracking_line(Settings(), only_look=False, findings=findings)
    assert only(findings, "tracking server").result == "warning"


def table(server: Server) -> dict[str, dict[str, str]]:
    """The newest preflight table on the server, check -> row."""
    import httpx

    body = {"artifacts": {"key": {"any_": ["preflight"]}}, "sort": "CREATED_DESC", "limit": 1}
    [artifact] = httpx.post(f"{server.api_url}/artifacts/filter", json=body).json()
    rows = json.loads(artifact["data"])
    assert all(list(row) == ["check", "result", "found", "remedy"] for row in rows)
    return {row["check"]: row for row in rows}


def test_a_refused_run_shows_all_that_is_wrong(run_flow: Callable[..., Any], prefect_server: Server) -> None:
    wrong = {"dataset.name": "nowhere.jsonl", "training.max_length": "100000", "registry.model_name": "refused"}
    result = run_flow("smoke", *[word for name, value in wrong.items() for word in (f"--{name}", value)])
    assert result.returncode == 1
    assert "dataset.name='nowhere.jsonl': there is no such file" in result.stderr
    assert "training.max_length=100000 is beyond the" in result.stderr
    rows = table(prefect_server)
    assert rows["dataset"]["result"] == "refused"
    assert rows["dataset"]["remedy"] == "Change the setting, and run it again."
    assert rows["tokens"]["found"].startswith("training.max_length=100000 is beyond the 2048 positions")
    assert rows["tokens"]["remedy"] == "Set it to 2048 or less."
    assert {rows[check]["result"] for check in ("configuration", "libraries", "model", "registry")} <= {"ok", "warning"}
    assert re.search("main.default.refused is not in|is not there yet", rows["registry"]["found"]), "it makes no model"


def test_a_missing_right_is_refused_before_training(
    run_flow: Callable[..., Any], prefect_server: Server, place: Place, tmp_path: Path
) -> None:
    before = set((place.root / "trainings").glob("*"))
    denied = {"match": "POST .*/models$", "status": 403, "code": "PERMISSION_DENIED", "times": 99}
    with unity_catalog(tmp_path / "catalog") as url, faults(url, {**denied, "message": "no CREATE MODEL"}):
        result = run_flow("smoke", "--registry.model_name", "denied", MLFLOW_REGISTRY_URI=f"uc:{url}")
    assert result.returncode == 1, result.stdout
    message = result.stderr.strip().splitlines()[-1]
    assert f"registry uc:{url}, model main.default.denied: PERMISSION_DENIED" in message
    assert message.endswith("this must exist and you need CREATE MODEL on main.default")
    rows = table(prefect_server)
    assert (rows["registry"]["result"], rows["tracking server"]["result"]) == ("refused", "ok")
    assert rows["registry"]["remedy"] == "Check the token or the rights of who runs this."
    assert list(rows) == [check for check in CHECKS if check != "preflight"]
    assert set((place.root / "trainings").glob("*")) == before


def plan(place: Place, *arguments: str, **environment: str) -> tuple[int, dict[str, str], str]:
    """Exit code, check -> the rest of its line, and all that was printed."""
    environment = {**place.environment, **clean_environment(place), **environment}
    result = run_module("flows.finetune", *arguments, "--plan", **environment)
    rows = re.findall(r"^(\S[\w ]*?)  +((?:ok|warning|refused) .*)$", result.stdout, re.MULTILINE)
    return result.returncode, dict(rows), result.stdout + result.stderr


def test_a_plan_prints_the_table_and_makes_nothing(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    code, rows, output = plan(place, "smoke")
    assert code == 0, output
    assert list(rows) == [check for check in CHECKS if check != "preflight"]
    assert re.match(r"ok +samples/chat at version [0-9a-f]{12}$", rows["dataset"])
    assert rows["rows"].endswith("the first 300 rows: 300 of shape messages; 1,600 to train on")
    assert re.search(r"80 of 32 conversations and about 1,\d{3} tokens, .* 1.6 epochs of about 1,600", rows["steps"])
    assert "Qwen3ForCausalLM, 377,088 parameters, 2,048 positions" in rows["model"]
    assert rows["time"].endswith("unknown until the first steps: no training of this model on a CPU was measured here")
    assert "\x1b" not in output
    assert "server" not in output.replace("tracking server", "")
    made = {path.name for path in place.root.iterdir()}
    assert made <= {"cache", "huggingface", "prefect", "tmp"}
    assert not list((place.root / "tmp").iterdir())
    assert not list(place.home.iterdir())


def test_a_plan_tells_all_that_is_refused(tmp_path: Path) -> None:
    """The hub cannot be reached: a plain line, and the other checks go on."""
    away = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "FINETUNE_GPU_HOUR_PRICE": ""}
    code, rows, output = plan(make_place(tmp_path), "qwen3-4b", "--dataset.name", "samples/chat", **away)
    assert code == 1
    assert rows["configuration"].startswith("refused  registry.allow_local=false and the registry is sqlite:///")
    assert re.match(
        r"refused  model.name='Qwen/Qwen3-4B': the hub was asked but could not be reached \(\w+: .*\)\.$", rows["model"]
    )
    assert rows["rows"].startswith("ok       the first 300 rows")
    assert "Traceback" not in output


def test_plan_is_one_option_among_the_others() -> None:
    assert parse(["--plan", "smoke", "--training.max_steps", "3"]) == (
        "smoke",
        {"plan": True, "training": {"max_steps": 3}},
    )
    wrong = run_module("flows.finetune", "smoke", "--plan", "--training.eval_steps", "7")
    assert (wrong.returncode, wrong.stderr) == (1, "")
    assert wrong.stdout.startswith("configuration    refused  training.save_steps=40 is not a multiple of")
    with pytest.raises(RefusedConfiguration, match=r"^--plam: there is no such option. Did you mean plan\?$"):
        parse(["smoke", "--plam"])


def test_the_hub_is_sampled_without_weights_and_without_a_download(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    rows = [conversation(number) for number in range(600)]
    card = b"---\ndataset_info:\n  splits:\n  - name: train\n    num_examples: 600\n---\n"
    model = {file.name: file.read_bytes() for file in (PROJECT / "samples" / "model").iterdir()}
    repositories = {
        ("dataset", "org/chat"): Repository(COMMIT, {"train.jsonl": lines(rows), "README.md": card}),
        ("model", "org/tiny"): Repository(COMMIT, model),
    }
    with serve(repositories) as hub:
        environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        names = ["--dataset.name", "org/chat", "--model.name", "org/tiny"]
        code, found, output = plan(place, "smoke", *names, **environment)
    assert code == 0, output
    assert found["dataset"] == f"ok       org/chat at version {COMMIT[:12]}"
    assert found["rows"] == "ok       the first 300 rows: 300 of shape messages; 540 to train on"
    assert "Qwen3ForCausalLM, 377,088 parameters" in found["model"]
    assert found["tokens"].startswith("ok ")
    assert "model.safetensors" not in hub.sent
    assert not [path for path in place.root.rglob("*.safetensors")]
    assert not [path for path in place.root.rglob("*.arrow")], "the rows were not prepared"
