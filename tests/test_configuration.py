"""Sections, recipes, overrides, the command line and settings."""

import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import parse
from config.recipes import RefusedConfiguration, flatten, merge, read_recipe, resolve, validate
from config.sections import Config, TrainingSection
from config.settings import Settings
from tests.conftest import PROJECT, run_module


def test_one_override_changes_one_value() -> None:
    recipe = read_recipe("smoke")
    before = flatten(resolve("smoke", recipe, {}).config.model_dump())
    after = flatten(resolve("smoke", recipe, {"training": {"max_steps": 3}}).config.model_dump())
    assert {name for name in before if before[name] != after[name]} == {"training.max_steps"}
    assert after["training.max_steps"] == 3


def test_what_the_form_repeats_was_not_given() -> None:
    """Prefect's form sends every value, the defaults as well."""
    recipe = read_recipe("smoke")
    before = resolve("smoke", recipe, {})
    form = before.config.model_dump()
    assert resolve("smoke", recipe, form) == before
    form["training"]["seed"] = 7
    form["training"]["bf16"] = True  # the default, which is not what the recipe has
    origins = resolve("smoke", recipe, form).origins
    assert {name for name, origin in origins.items() if origin == "given"} == {"training.seed", "training.bf16"}


def test_every_value_has_an_origin() -> None:
    # Prefect hands the flow the deployment's parameters together with the overrides: both arrive as given.
    recipe = {"model": {"name": "m"}, "training": {"max_steps": 5, "seed": 1}}
    given = {"model": {"name": "m"}, "training": {"max_steps": 3}}
    origins = resolve("r", recipe, given).origins
    assert origins["model.name"] == "recipe r"
    assert origins["training.max_steps"] == "given"
    everything = Config.model_validate(merge(recipe, given)).model_dump()
    assert resolve("r", recipe, everything).origins == origins, "the form of the UI sends every value that it shows"
    assert origins["training.seed"] == "recipe r"
    assert origins["training.learning_rate"] == "default"
    assert set(origins) == set(flatten(Config().model_dump()))


def test_a_recipe_without_values_of_its_own_is_named_as_well() -> None:
    assert resolve("qwen3-4b", {}, {}).recipe == "qwen3-4b"


def test_merge_is_deep_and_changes_neither_side() -> None:
    base, override = {"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}}
    assert merge(base, override) == {"a": {"b": {"c": 3, "d": 2}}}
    assert base == {"a": {"b": {"c": 1, "d": 2}}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"training": {"max_stesp": 3}},
            "training.max_stesp=3: there is no such key. Did you mean training.max_steps?",
        ),
        ({"trainig": {"max_steps": 3}}, "trainig={'max_steps': 3}: there is no such key. Did you mean training?"),
        ({"training": {"max_steps": 0}}, "training.max_steps=0: Input should be greater than or equal to 1"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate='fast': Input should be a valid number"),
        ({"registry": {"model_name": "a.b"}}, "registry.model_name='a.b': String should match pattern"),
        ({"training": {"eval_steps": 20}}, "training.save_steps=25 is not a multiple of training.eval_steps=20"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_remedy(values: dict, message: str) -> None:
    with pytest.raises(RefusedConfiguration) as refused:
        validate(values)
    assert str(refused.value).startswith(message)


def test_overrides_that_fit_only_together_with_the_recipe_are_accepted() -> None:
    recipe = {"training": {"eval_steps": 10, "save_steps": 10}}
    assert resolve("r", recipe, {"training": {"save_steps": 20}}).config.training.save_steps == 20
    TrainingSection(eval_steps=20)  # a section alone may be half of a pair


def test_unknown_deployment_names_the_nearest() -> None:
    with pytest.raises(RefusedConfiguration, match=r"deployment 'smok' is not in prefect\.yaml\. Did you mean smoke\?"):
        read_recipe("smok")


def test_one_option_sets_one_value() -> None:
    assert parse(["smoke", "--training.max_steps", "20"]) == ("smoke", {"training": {"max_steps": 20}})
    given = parse(["smoke", "--training.bf16=false", "--dataset.test_split", "null", "--model.name", "x"])[1]
    assert given == {"training": {"bf16": False}, "dataset": {"test_split": None}, "model": {"name": "x"}}


def test_the_environment_never_becomes_a_hyperparameter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRAINING", "MODEL", "DEPLOYMENT", "TRAINING__MAX_STEPS"):
        monkeypatch.setenv(name, '{"max_steps": 7, "name": "from-the-environment"}')
    assert parse(["smoke"]) == ("smoke", {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["smoke", "--training.max_stesp", "3"],
            "--training.max_stesp: there is no such option. Did you mean training.m",
        ),
        (["smoke", "--training.max_ste", "3"], "--training.max_ste: there is no such option"),
        (["smoke", "--training.max_steps", "0"], "training.max_steps='0': Input should be greater"),
        (["smoke", "--training.max_steps", "many"], "training.max_steps='many': Input should be a valid integer"),
        ([], "error parsing CLI: the following arguments are required: DEPLOYMENT"),
        (["smoke", "again"], "error parsing CLI: unrecognized arguments: again"),
    ],
)
def test_the_command_line_refuses(arguments: list[str], message: str) -> None:
    with pytest.raises(RefusedConfiguration) as refused:
        parse(arguments)
    assert str(refused.value).startswith(message)


def test_wrong_usage_exits_with_2_and_one_line() -> None:
    result = run_module("flows.finetune", "smoke", "--training.max_stesp", "3")
    assert result.returncode == 2
    assert result.stderr == "--training.max_stesp: there is no such option. Did you mean training.max_steps?\n"


def test_flow_and_command_line_have_every_section() -> None:
    from config.cli import CommandLine
    from config.sections import Config
    from flows.finetune import finetune

    sections = list(Config.model_fields)
    assert list(finetune.parameters.properties) == sections
    assert [name for name in CommandLine.model_fields if name not in ("deployment", "plan")] == sections


def test_help_and_the_flow_import_no_ml_library() -> None:
    """Also on a machine without torch the form of the Prefect UI must be complete."""
    result = run_module("flows.finetune", "--help")
    assert result.returncode == 0
    assert "--training.learning_rate" in result.stdout
    assert "temporary server" not in result.stdout + result.stderr
    heavy = "{'torch', 'transformers', 'trl', 'datasets', 'mlflow', 'accelerate', 'pandas'}"
    code = f"import sys, flows.finetune; print(sorted({heavy} & set(sys.modules)))"
    imported = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, text=True, capture_output=True, check=True)
    assert imported.stdout.strip() == "[]"


def test_settings_keep_the_ecosystems_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FINETUNE_STORAGE_ROOT", str(tmp_path / "root"))
    Path(".env").write_text("HF_TOKEN=hf_secret\nMLFLOW_TRACKING_URI=databricks\n")
    settings = Settings()
    assert settings.registry_uri == "databricks-uc"
    assert settings.artifact_location is None
    assert settings.volumes == tmp_path / "root" / "volumes"
    assert "hf_secret" not in repr(settings)
    assert settings.environment()["HF_TOKEN"] == "hf_secret"


def test_tracking_defaults_to_a_database_below_the_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FINETUNE_STORAGE_ROOT", "relative")
    settings = Settings()
    assert settings.tracking_uri == settings.registry_uri == f"sqlite:///{tmp_path}/relative/mlflow/mlflow.db"
    assert settings.artifact_location == f"file://{tmp_path}/relative/mlflow/artifacts"
