"""The report of a run, and what is left of one that fails: what they say, and that they only show what others wrote."""

import json
import re
import shlex
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from config.cli import parse
from config.recipes import read_recipe, resolve
from config.sections import Config
from config.settings import Settings
from finetuning import links
from finetuning.artifacts import fingerprint, write_json, write_manifest
from finetuning.curves import data_uri
from finetuning.evaluate import ANSWERS
from finetuning.export import PROVENANCE
from finetuning.inputs import Input
from finetuning.markdown import code, duration, fence, link, page, table, text
from finetuning.report import Job, curve, run
from finetuning.report_text import write
from finetuning.reproduce import command
from finetuning.resume import STATE, training_fingerprint
from finetuning.tokens import REPORT
from tests.conftest import Server

RunFlow = Callable[..., subprocess.CompletedProcess[str]]
NASTY = "<script>alert(1)</script> [click](javascript:alert(1)) | ![x](http://h/x.png) **b**\n# head\n```\n&lt; `c`"
PICTURE = "data:image/png;base64,AAAA"
COMMIT = "5b8fa6e4bd06b5a0dd8d8a1bd0a6f6e7e5d5a7a1"


def answer(words: str) -> dict[str, Any]:
    return {"question": NASTY, "reference": "On Friday.", "answer": words, "exact_match": False, "stopped": True}


def score(loss: float) -> dict[str, Any]:
    return {"num_rows": 70, "loss": loss, "num_questions": 2, "exact_match": 0.5, "stopped": 1.0}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Of a run that made a challenger on one GPU; there is a champion."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "http://user:secret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    evaluations = {}
    for name in ("base", "champion", "candidate"):
        evaluations[name] = tmp_path / name
        evaluations[name].mkdir()
        write_json(evaluations[name] / ANSWERS, [answer(f"{name} says {NASTY}"), answer("x" * 5000)])
    history = [{"step": 10 * step, "loss": 3.0 / (step + 1)} for step in range(500)] + [{"step": 40, "eval_loss": 1.0}]
    result = {"log_history": history, "checkpoint": "checkpoint-40", "num_steps": 50, "num_tokens": 123456}
    result |= {"eval_loss": 1.0, "train_seconds": 1800.0, "num_gpus": 1, "peak_memory_gib": 61.5}
    result |= {"time_shares": {"data": 0.01, "forward_backward": 0.9, "checkpoint": 0.09}}
    write_json(tmp_path / STATE, {"mlflow_run_id": "abc", "mlflow_experiment_id": "7", "result": result})
    counts = {"rows": 1000, "truncated_rows": 3, "dropped": {"empty": 2}, "first_bad": {"empty": f"row 5: {NASTY}"}}
    counts |= {"tokens": {"p50": 30, "p99": 50, "read": 50000, "cut": 10, "trained": 20000}}
    write_json(tmp_path / REPORT, {"max_length": 2048, "train": counts, "test": {**counts, "dropped": {}}})
    write_json(tmp_path / PROVENANCE, {"libraries": {"finetune": "0.1.0 at abc1234+changed", "torch": "2.13.0"}})
    given = {"training": {"max_steps": 40}, "registry": {"model_name": "support_bot"}, "dataset": {"group_by": "it's"}}
    resolved = resolve("qwen3-4b", read_recipe("qwen3-4b"), given)
    hub = {"path": None, "version": COMMIT}
    steps = [{"name": "train", "seconds": 1900, "state": "Completed"}]
    return Job(
        **resolved._asdict(),
        dataset={"name": "trl-lib/Capybara", **hub},
        model={"name": "Qwen/Qwen3-4B", **hub},
        training=tmp_path,
        tokens=tmp_path,
        model_directory=tmp_path,
        published=Path("/Volumes/main/default/checkpoints/support_bot/0123"),
        evaluation={
            "scores": {"base": score(2.0), "champion": score(1.0), "candidate": score(0.99)},
            "artifacts": evaluations,
            "champion": "3",
        },
        name="main.default.support_bot",
        number="4",
        created=True,
        outcome="challenger",
        reason="failed: loss 0.99 against 1 of champion version 3 on 70 rows, which is not beyond",
        steps=[*steps, {"name": "tokenize", "seconds": 0.001, "state": "Cached"}],
        total_seconds=7200,
        flow_run_name="brave-*fox*",
        flow_run_url="http://127.0.0.1:4200/runs/flow-run/1",
    )


def html(markdown: str) -> str:
    """Without what is around the text."""
    return page("t", markdown).partition("<body>")[2]


def shown(markdown: str) -> str:
    """The text that a reader sees."""
    from html import unescape

    return unescape(re.sub(r"<[^>]+>", "", html(markdown)))


def test_the_verdict_is_in_the_first_line_and_everything_else_below(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FINETUNE_GPU_HOUR_PRICE", "2.5")
    markdown = write(job, PICTURE)
    assert shown(markdown.splitlines()[0]).strip() == "challenger: main.default.support_bot version 4"
    seen = shown(markdown)
    for words in (
        "failed: loss 0.99 against 1 of champion version 3",
        "registered by this run",
        f"Qwen/Qwen3-4B at {COMMIT}",
        "/Volumes/main/default/checkpoints/support_bot/0123",
        "50, 123,456",
        "2.00 GPU hours were held by this run; 0.50 of a training are in its loop. At 2.5 an hour that is 5.00.",
        "The training loop took 30 min 0 s when it ran to its end: 1% data, 90% forward and backward, 9% checkpoint.",
        "mlflow models serve -m models:/main.default.support_bot/4 --env-manager local",
        "python -m finetuning.serving vllm models:/main.default.support_bot/4 --output vllm.yaml",
        "git checkout abc1234\n",
        "Files of the checkout differed from that commit.",
        "the first empty of train: row 5",
    ):
        assert words in seen, words
    assert "| Loss, nats a trained token | 2 | 1 | 0.99 |" in markdown
    assert "| dropped\\: empty | 2 | 0 |" in markdown
    assert "base model | champion, version 3 | this version, 4" in markdown
    assert "secret" not in markdown


def test_text_of_the_dataset_and_of_models_stays_text(job: Job) -> None:
    markdown = write(job, PICTURE)
    rendered = html(markdown)
    assert not re.search(r"<(script|strong>b|h1>head)", rendered)
    assert re.findall(r"<img[^>]*>", rendered) == [f'<img src="{PICTURE}" alt="Loss by optimizer step" />']
    assert "javascript:" not in "".join(re.findall(r'(?:href|src)="([^"]*)"', rendered))
    one_line = " ↵ ".join(NASTY.splitlines())
    assert shown(markdown).count(one_line) == 2 + 3 + 2, "two questions, three answers, two first bad rows"
    assert len(markdown) < 20_000, "long answers are cut"


def test_without_champion_evaluation_gpu_or_recipe(job: Job) -> None:
    scores = {name: job.evaluation.scores[name] for name in ("base", "candidate")}
    alone = job.model_copy(update={"evaluation": job.evaluation.model_copy(update={"scores": scores})})
    assert "There was no champion to compare it with" in shown(write(alone, PICTURE))
    bare = {"evaluation": type(job.evaluation)(), "recipe": None, "outcome": "champion", "flow_run_url": None}
    state = job.training_state()
    write_json(job.training / STATE, {"result": {**state["result"], "num_gpus": 0, "time_shares": {}}})
    seen = shown(write(job.model_copy(update=bare), PICTURE))
    assert "Nothing was measured" in seen
    assert "No GPU was used." in seen
    assert "not made yet at" in seen
    assert "Answers to" not in seen


def test_the_command_makes_the_same_configuration(job: Job) -> None:
    words = shlex.split(command(job).replace("\\\n", ""))
    assert words[:4] == ["python", "-m", "flows.finetune", "qwen3-4b"]
    recipe, given = parse(words[3:])
    again = resolve(recipe, read_recipe(recipe), given).config
    pinned = {kind: {**job.config.model_dump()[kind], "revision": COMMIT} for kind in ("model", "dataset")}
    assert again.model_dump() == {**job.config.model_dump(), **pinned}
    unknown = job.model_copy(update={"recipe": "gone"})
    assert command(unknown) == command(job)


def test_the_picture_is_small_and_a_server_that_is_away_costs_a_warning(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    mlflow.set_tracking_uri("http://user:secret@127.0.0.1:9")
    try:
        written = run(job.model_dump(mode="json"))
    finally:
        mlflow.set_tracking_uri(None)
    assert 1000 < len(written["curve"]) < 30_000, "it stands in Prefect's database, twice"
    assert written["curve"] in written["markdown"]
    assert curve(job).startswith(b"\x89PNG")
    assert "the report could not be kept with MLflow run abc" in caplog.text
    assert "secret" not in caplog.text + json.dumps(written)


@pytest.mark.parametrize(
    ("tracking", "registry", "host", "of_run", "of_version"),
    [
        ("http://u:p@h:5000/", "http://h:5000", None, "http://h:5000/#/experiments/7/runs/r", "http://h:5000/#/models/a.b.c/versions/2"),
        ("sqlite:////db", "sqlite:////db", None, None, None),
        ("databricks", "databricks-uc", "https://w.example/", "https://w.example/ml/experiments/7/runs/r", "https://w.example/explore/data/models/a/b/c/version/2"),
        ("databricks", "databricks-uc://profile", None, None, None),
        ("sqlite:////db", "uc:http://h:8080", None, None, None),
    ],
)  # fmt: skip
def test_links_lead_somewhere_or_are_none(
    tracking: str, registry: str, host: str | None, of_run: str | None, of_version: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry)
    monkeypatch.setenv("DATABRICKS_HOST", host or "")
    assert links.run_url("r", "7") == of_run
    assert links.run_url("r", None) is None
    assert links.version_url("a.b.c", "2") == of_version


def test_markdown() -> None:
    assert html(text(NASTY)).count("<") == 2 + html("").count("<"), "one paragraph"
    assert shown(text(NASTY)).strip() == " ↵ ".join(NASTY.splitlines())
    assert shown(text("x" * 10, 4)).strip() == "xxxx …"
    assert html(table(["a"], [[text("a|b\nc")]])).count("<td>") == 1
    assert html(table(["a"], [[code("a|`b`")]])).count("<td>") == 1
    assert html(code("/a/<b>")).startswith("\n<p><code>/a/&lt;b&gt;</code></p>")
    assert html(fence("````\n<b>")).count("<pre>") == 1
    assert 'href="http://h/a%20b%3Ec"' in html(link("x](y)", "http://h/a b>c"))
    assert html(link("x](y)", None)).count("<a") == 0
    assert [duration(seconds) for seconds in (0.04, 12, 59.7, 3599.7, 7300)] == [
        "0.0 s", "12 s", "1 min 0 s", "1 h 0 min", "2 h 1 min",
    ]  # fmt: skip


# What a training shows while it runs


@pytest.fixture
def api(prefect_server: Server) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.events.worker import EventsWorker
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: prefect_server.api_url}), get_client(sync_client=True) as client:
        yield client
        EventsWorker.drain_all()  # an artifact's event, which would miss the server when the session ends


def of_flow_run(api: Any, flow_run_id: object) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    return api.read_artifacts(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id])))


def test_progress_curve_and_links_of_a_training(api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect import flow, runtime
    from prefect.settings import PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

    from tasks.progress import TrainingProgress

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    write_json(tmp_path / STATE, {"mlflow_run_id": "abc", "mlflow_experiment_id": "7"})
    step = {"loss": None, "max_steps": 8, "tokens_per_second": 1000, "eta_seconds": 200}

    @flow
    def shows() -> str:
        progress, picture = TrainingProgress(Config(), tmp_path), tmp_path / "loss.png"
        for event in ({"mlflow_run_id": "abc"}, {**step, "step": 1}, {**step, "step": 2}, {"mlflow_run_id": "abc"}):
            progress(event)
        for content in (b"first", b"second"):
            picture.write_bytes(content)
            progress({"curve": str(picture)})
        progress.finish(8)
        TrainingProgress(Config(), tmp_path).finish(8)
        return runtime.flow_run.id

    with temporary_settings({PREFECT_LOGGING_TO_API_ENABLED: False}):
        made = of_flow_run(api, shows())
    assert [one.data for one in made if one.key == "loss-curve"] == [data_uri(b"second")]
    assert [one.data for one in made if one.key == "mlflow-run"] == [
        "[MLflow run abc](http://127.0.0.1:9/#/experiments/7/runs/abc)"
    ] * 2
    assert sorted((one.data, one.description) for one in made if one.key == "training-qwen3-4b-assistant") == [
        (12.5, "Step 1 of 8, 1,000 tokens/s, 3 min 20 s to go"),  # the second came too soon after it
        (100.0, "All 8 steps were done before"),
    ]


def test_the_curve_is_drawn_once_in_a_while_and_stops_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    from types import SimpleNamespace

    from finetuning import callbacks

    state = SimpleNamespace(log_history=[{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    drawn = callbacks.Curve(tmp_path / "loss.png")
    drawn.on_log(None, state, None)
    assert not drawn.path.exists()
    monkeypatch.setattr(callbacks, "CURVE_SECONDS", 0)
    drawn.on_log(None, state, None)
    assert drawn.path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f'PROGRESS {{"curve": "{drawn.path}"}}\n'
    callbacks.Curve(tmp_path / "no" / "folder.png").on_log(None, state, None)
    assert "the loss curve could not be drawn" in caplog.text


# What a run that does not come to its end leaves behind


def failure_artifact(api: Any, flow_run_id: object) -> Any:
    [artifact] = [one for one in of_flow_run(api, flow_run_id) if one.key == "failure"]
    return artifact


def test_a_refused_run_says_why_where_and_what_helps(run_flow: RunFlow, api: Any) -> None:
    from prefect.client.schemas.sorting import FlowRunSort

    refused = run_flow("smoke", "--dataset.name", "nowhere/rows.jsonl")
    assert refused.returncode == 1
    [flow_run] = api.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)
    artifact = failure_artifact(api, flow_run.id)
    assert artifact.description == "Failed: configuration"
    seen = shown(artifact.data)
    assert seen.strip().startswith("Failed: configuration")
    assert "dataset.name='nowhere/rows.jsonl': there is no such file" in seen
    assert "In the step preflight." in seen
    assert "What helps. Change the setting, and run it again." in seen
    assert "it ended before anything was made" in seen


def test_a_cancelled_run_says_what_goes_on_from_where(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.states import Cancelling

    from flows.finetune import finetune
    from tasks.hooks import tell_cancellation
    from tasks.kept import kept

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    flow_run = api.create_flow_run(finetune)
    assert kept(flow_run.id) == []
    dataset, training = begun(flow_run.id)
    tell_cancellation(finetune, flow_run, Cancelling())
    artifact = failure_artifact(api, flow_run.id)
    seen = shown(artifact.data)
    assert seen.strip().startswith("Cancelled")
    assert "goes on from checkpoint-25 of 50 steps" in seen
    assert str(dataset) in seen
    assert str(training / "log.txt") in seen
    assert "prepared model" not in seen
    assert "(<http://127.0.0.1:9/#/experiments/7/runs/abc>)" in artifact.data


def begun(flow_run_id: object) -> tuple[Path, Path]:
    """Directories of dataset and training of a run that was cut short while it wrote its second checkpoint."""
    from tasks.data import dataset_fingerprint
    from tasks.model import model_fingerprint
    from tasks.tokens import tokens_fingerprint

    root = Settings().storage_root
    config = resolve(None, {}, {"training": {"seed": uuid.uuid4().int % 10**6}}).config  # a training of its own
    source = Input(name="x", path=None, version=fingerprint(of="a cancelled run"))
    inputs = {kind: source.model_dump(mode="json") for kind in ("dataset", "model")}
    (root / "runs").mkdir(parents=True, exist_ok=True)
    write_json(root / "runs" / f"{flow_run_id}.json", {"config": config.model_dump(), "inputs": inputs})
    dataset, model = dataset_fingerprint(config.dataset, source), model_fingerprint(config.model, source)
    training = root / "trainings" / training_fingerprint(config, tokens_fingerprint(config, dataset, model), model)
    for path in (root / "datasets" / dataset, training / "checkpoints" / "checkpoint-25"):
        path.mkdir(parents=True, exist_ok=True)
        write_manifest(path)
    (training / "checkpoints" / "checkpoint-50").mkdir()
    write_json(training / STATE, {"mlflow_run_id": "abc", "mlflow_experiment_id": "7"})
    return root / "datasets" / dataset, training
