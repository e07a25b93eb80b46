"""prefect.yaml and the packaging files, as far as they can be checked without a server."""

import inspect
import re
import shlex
from importlib import import_module
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from config.deployments import problems
from config.recipes import resolve
from config.sections import Config
from tests.conftest import PROJECT

FILE = yaml.safe_load((PROJECT / "prefect.yaml").read_text())
DEPLOYMENTS = {deployment["name"]: deployment for deployment in FILE["deployments"]}

# Prefect ignores keys that it does not know, so a misspelt one would be no error anywhere else.
TOP_LEVEL_KEYS = {"name", "prefect-version", "pull", "definitions", "deployments"}

# The notebook's own settings. `NEW_NAMES` says what today's libraries call them.
NOTEBOOK = {
    "torch_dtype": "bfloat16",
    "trust_remote_code": True,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 8,
    "learning_rate": 2e-5,
    "max_steps": 50,
    "eval_steps": 25,
    "save_steps": 25,
    "logging_steps": 10,
    "save_total_limit": 2,
    "report_to": "mlflow",
    "warmup_steps": 10,
    "weight_decay": 0.01,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "evaluation_strategy": "steps",
    "save_strategy": "steps",
    "load_best_model_at_end": True,
    "bf16": True,
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "dataloader_pin_memory": False,
    "remove_unused_columns": False,
    "max_seq_length": 1024,  # not set there: the default of TRL
    "packing": False,
}
NEW_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
    "max_seq_length": "max_length",
}


AUTOMATIONS = yaml.safe_load((PROJECT / "automations.yaml").read_text())["automations"]
TRIGGERS = [automation["trigger"] for automation in AUTOMATIONS]


def config_of(name: str) -> Config:
    return resolve(name, DEPLOYMENTS[name].get("parameters") or {}, {}).config


def test_the_fixed_names_exist() -> None:
    assert {"qwen3-4b", "qwen3-4b-notebook", "smoke"} <= set(DEPLOYMENTS)


def test_every_key_is_one_that_prefect_reads() -> None:
    assert set(FILE) <= TOP_LEVEL_KEYS


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_deployment_and_schedule_resolves(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    assert list(problems(deployment)) == []
    assert deployment["work_pool"]["job_variables"]["stream_output"] is False
    assert "finetune" in deployment["tags"], "by this tag the automations know it"
    heartbeat = int(deployment["work_pool"]["job_variables"]["env"]["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"])
    assert 2 * heartbeat < min(trigger["within"] for trigger in TRIGGERS if trigger["posture"] == "Proactive")
    assert deployment["description"]


def test_what_starts_by_itself_is_off_until_somebody_wants_it() -> None:
    [weekly] = DEPLOYMENTS["qwen3-4b"]["schedules"]
    [on_data] = DEPLOYMENTS["qwen3-4b"]["triggers"]
    assert (weekly["slug"], weekly["active"], on_data["enabled"]) == ("weekly", False, False)
    assert on_data["expect"] == ["finetune.dataset.updated"]
    assert on_data["match"] == {"prefect.resource.id": f"finetune.dataset.{config_of('qwen3-4b').dataset.name}"}
    for name in DEPLOYMENTS:
        trigger, schedule = DEPLOYMENTS[name].get("triggers"), DEPLOYMENTS[name].get("schedules")
        assert name == "qwen3-4b" or not (trigger or schedule)


NIGHTLY: dict[str, Any] = {"slug": "night", "cron": "0 3 * * *", "timezone": "Etc/UTC"}
BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"triger": []}, "deployment it: triger=[]: this key is not used here. Did you mean triggers?"),
    ({"concurrency_limit": 1}, "deployment it: concurrency_limit=1: this key is not used here."),
    ({"parameters": {"training": {"max_steps": 0}}}, "deployment it: training.max_steps=0: Input should be greater"),
    ({"work_pool": {"name": "h100", "queue": "x"}}, "deployment it, work_pool: queue='x': this key is not used here."),
    (
        {"schedules": [NIGHTLY | {"parameters": {"training": {"max_stesp": 3}}}]},
        "deployment it, schedule night: training.max_stesp=3: there is no such key. Did you mean training.max_steps?",
    ),
    (
        {"schedules": [NIGHTLY | {"timezone": None}]},
        "deployment it, schedule night: timezone is not set and would be UTC",
    ),
    ({"schedules": [NIGHTLY | {"slug": None}]}, "slug=None: give it one of its own"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_a_mistake_is_named_with_its_place_and_value(block: dict[str, Any], said: str) -> None:
    found = list(problems({"name": "it", "work_pool": {"name": "h100"}, **block}))
    assert found
    assert said in found[0]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_entrypoint_is_the_flow(name: str) -> None:
    path, _, function = DEPLOYMENTS[name]["entrypoint"].partition(":")
    assert (PROJECT / path).is_file()
    flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), function)
    assert flow.name == "finetune"
    sections = inspect.signature(flow.fn).parameters
    assert set(sections) == set(Config.model_fields)
    assert {name: type(parameter.default) for name, parameter in sections.items()} == {
        name: field.annotation for name, field in Config.model_fields.items()
    }


def test_the_notebook_recipe_is_the_notebook() -> None:
    """Compared with the SFTConfig that comes out, not with our own section."""
    from finetuning.trainer import sft_config

    config = config_of("qwen3-4b-notebook")
    arguments = sft_config(config, PROJECT / "unused")
    assert (config.model.name, config.dataset.name) == ("Qwen/Qwen3-4B", "trl-lib/Capybara")
    assert (config.dataset.test_size, config.dataset.split_seed) == (0.1, 42)
    assert config.registry.registered_model_name == "main.default.qwen3_4b_assistant"
    assert config.registry.volume == "checkpoints"
    found = {old: _plain(getattr(arguments, NEW_NAMES.get(old, old), None)) for old in NOTEBOOK}
    found["torch_dtype"] = config.training.weight_dtype
    assert found == NOTEBOOK
    assert arguments.run_name == "Qwen3-4B_full-fine-tuning"


def test_qwen3_4b_differs_from_the_notebook_in_these_values() -> None:
    ours, notebook = config_of("qwen3-4b").model_dump(), config_of("qwen3-4b-notebook").model_dump()
    different = {
        f"{section}.{name}": (ours[section][name], notebook[section][name])
        for section in ours
        for name in ours[section]
        if ours[section][name] != notebook[section][name]
    }
    assert different == {
        "training.precision": ("fp32", "bf16"),
        "training.eval_max_rows": (256, None),
        "training.max_length": (2048, 1024),
        "training.assistant_only_loss": (True, False),
        "model.chat_style": ("auto", "keep"),
        "model.trust_remote_code": (False, True),
        "dataset.deduplicate": (True, False),
        "gate.better_than": ("champion", "none"),
        "gate.approval": (False, True),
    }


def test_code_defaults_are_the_recommended_recipe() -> None:
    assert config_of("qwen3-4b") == Config()


def test_a_section_has_help_and_title_for_every_field() -> None:
    for section in Config.model_fields.values():
        assert issubclass(section.annotation, BaseModel)
        for name, field in section.annotation.model_fields.items():
            assert field.description, f"{name} has no help"
            assert field.title, f"{name} has no title"


def test_the_image_copies_what_exists_and_installs_the_same_constraints() -> None:
    lines = (PROJECT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in shlex.split(line)[1:-1]]
    kept = [line[1:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert {"config/", "finetuning/", "tasks/", "flows/", "prefect.yaml", "constraints.txt"} <= set(copied)
    for path in copied:
        assert (PROJECT / path).exists(), path
        assert path.rstrip("/") in kept, f"{path} is not in the build context"
    install = next(line for line in lines if "pip install" in line)
    makefile = (PROJECT / "Makefile").read_text()
    assert "-c constraints.txt" in install
    assert "-c constraints.txt" in makefile
    assert lines.index(install) < lines.index("COPY flows/ flows/"), "dependencies are the earlier layer"
    assert any(line.startswith("USER ") and "root" not in line for line in lines)
    assert not re.search(r"(TOKEN|PASSWORD|SECRET|API_KEY)=", "\n".join(lines))


def test_constraints_pin_every_dependency_for_any_machine() -> None:
    text = (PROJECT / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert not [name for name in pins if name.startswith("nvidia-") and name != "nvidia-ml-py"]
    assert not [pin for pin in pins.values() if "+" in pin], "a build label is not found on another machine"
    project = (PROJECT / "pyproject.toml").read_text()
    wanted = re.findall(r'^ +"([a-z0-9-]+)>=', project, flags=re.MULTILINE)
    assert len(wanted) > 10
    assert not set(wanted) - {name.lower().replace("_", "-") for name in pins}


def _plain(value: Any) -> Any:
    """An enum's value, and a one-element list's element: SFTConfig normalises both ways."""
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return getattr(value, "value", value)
