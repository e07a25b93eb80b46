"""Settings of the machine a run happens on: where things are stored and which servers are used. Never a hyperparameter.

Read from the environment and from `.env` in the working directory. Our own names start with `FINETUNE_`; the variables
that the libraries already have (`MLFLOW_TRACKING_URI`, `HF_TOKEN`, ...) keep their names.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PROJECT_ROOT = Path(__file__).resolve().parent.parent
VOLUMES = Path("/Volumes")
"""Where Databricks mounts the volumes of Unity Catalog."""
SHORTEST_SECRET = 8
"""Characters; a shorter value is no secret, but `none`, which stands in for one, and in other words."""


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="FINETUNE_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        populate_by_name=True,
        use_attribute_docstrings=True,
    )

    storage_root: Path = Path("~/.finetune")
    """Where every artifact of every run lives. It must outlive the worker: a local disk, a PVC, a shared file system.
    """

    volume_root: Path | None = None
    """Where finished model directories are published. Default: `/Volumes` where it is mounted (Databricks) or can be
    reached over DATABRICKS_HOST, otherwise the folder `volumes` under the storage root."""

    grace_seconds: float = Field(20, ge=0)
    """Seconds that a step has between SIGTERM and SIGKILL, for a checkpoint. Below 30: so long Prefect waits for a
    cancelled flow before it kills it."""

    training_timeout_seconds: float | None = Field(None, gt=0)
    """Longest time that one try of a training may take; then it saves a checkpoint and the run fails. Empty: none."""

    max_run_count: int = Field(5, ge=1)
    """How often one flow run may be started, after crashes, before it fails for good."""

    tracking_required: bool = True
    """Refuse to start while the MLflow server cannot be reached. Off: train, and log everything afterwards."""

    gpu_hour_price: float | None = Field(None, ge=0)
    """Price of one GPU hour, in the currency you think in. Empty: costs are told in GPU hours."""

    shared_storage: bool = False
    """The storage root is shared by several hosts: a lease file guards each artifact, besides the local lock."""

    mlflow_tracking_uri: str | None = Field(None, validation_alias="MLFLOW_TRACKING_URI")
    mlflow_registry_uri: str | None = Field(None, validation_alias="MLFLOW_REGISTRY_URI")
    mlflow_experiment_name: str = Field("finetune", validation_alias="MLFLOW_EXPERIMENT_NAME")
    mlflow_tracking_username: str | None = Field(None, validation_alias="MLFLOW_TRACKING_USERNAME")
    mlflow_tracking_password: SecretStr | None = Field(None, validation_alias="MLFLOW_TRACKING_PASSWORD")
    mlflow_tracking_token: SecretStr | None = Field(None, validation_alias="MLFLOW_TRACKING_TOKEN")
    hf_token: SecretStr | None = Field(None, validation_alias="HF_TOKEN")
    hf_home: Path | None = Field(None, validation_alias="HF_HOME")
    hf_hub_offline: bool = Field(False, validation_alias="HF_HUB_OFFLINE")
    databricks_host: str | None = Field(None, validation_alias="DATABRICKS_HOST")
    databricks_token: SecretStr | None = Field(None, validation_alias="DATABRICKS_TOKEN")
    prefect_api_url: str | None = Field(None, validation_alias="PREFECT_API_URL")
    prefect_api_key: SecretStr | None = Field(None, validation_alias="PREFECT_API_KEY")
    prefect_api_auth_string: SecretStr | None = Field(None, validation_alias="PREFECT_API_AUTH_STRING")

    @field_validator("storage_root", "volume_root", "hf_home")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        return path and path.expanduser().absolute()

    @property
    def volumes(self) -> Path:
        if self.volume_root:
            return self.volume_root
        return VOLUMES if VOLUMES.is_dir() or self.volumes_are_remote else self.storage_root / "volumes"

    @property
    def volumes_are_remote(self) -> bool:
        """Whether they are written over Databricks' Files API."""
        return bool(self.databricks_host) and not self.volume_root and not VOLUMES.is_dir()

    @property
    def tracking_uri(self) -> str:
        return self.mlflow_tracking_uri or f"sqlite:///{self.storage_root / 'mlflow' / 'mlflow.db'}"

    @property
    def registry_uri(self) -> str:
        """MLflow's own rule: the tracking server is the registry, except that Databricks means Unity Catalog."""
        if self.mlflow_registry_uri:
            return self.mlflow_registry_uri
        return "databricks-uc" if self.tracking_uri.startswith("databricks") else self.tracking_uri

    @property
    def artifact_location(self) -> str | None:
        """Where a new experiment keeps its files; None leaves it to the tracking server. Only a database of our own
        needs one: MLflow's default for it is `./mlruns` of whatever the working directory is."""
        return (self.storage_root / "mlflow" / "artifacts").as_uri() if self.tracking_uri.startswith("sqlite") else None

    def environment(self) -> dict[str, str]:
        """The variables a process of ours runs with, so that what the libraries write lands below the storage root.

        A variable that is set already wins over these (see `apply_environment`). The values that came from `.env` are
        passed on under the libraries' names, secrets among them: this dictionary is for `os.environ`, not for a log.
        """
        root = self.storage_root
        variables = {
            "PREFECT_HOME": root / "prefect",
            "HF_HOME": self.hf_home or root / "huggingface",
            "TMPDIR": root / "tmp",
            "XDG_CACHE_HOME": root / "cache",
            "XDG_CONFIG_HOME": root / "cache" / "config",
            "TORCHINDUCTOR_CACHE_DIR": root / "cache" / "torchinductor",
            "TRITON_HOME": root / "cache",
            "MPLCONFIGDIR": root / "cache" / "matplotlib",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",  # of the temporary server; it can lock its new database
            "MLFLOW_TRACKING_URI": self.tracking_uri,
            "MLFLOW_REGISTRY_URI": self.registry_uri,
            "MLFLOW_EXPERIMENT_NAME": self.mlflow_experiment_name,
            "MLFLOW_TRACKING_USERNAME": self.mlflow_tracking_username,
            "MLFLOW_TRACKING_PASSWORD": self.mlflow_tracking_password,
            "MLFLOW_TRACKING_TOKEN": self.mlflow_tracking_token,
            "HF_TOKEN": self.hf_token,
            "HF_HUB_OFFLINE": "1" if self.hf_hub_offline else None,
            "DATABRICKS_HOST": self.databricks_host,
            "DATABRICKS_TOKEN": self.databricks_token,
            "PREFECT_API_URL": self.prefect_api_url,
            "PREFECT_API_KEY": self.prefect_api_key,
            "PREFECT_API_AUTH_STRING": self.prefect_api_auth_string,
        }
        profiles = Path("~/.prefect/profiles.toml").expanduser()
        if profiles.is_file():  # a login made with `prefect cloud login` still counts
            variables["PREFECT_PROFILES_PATH"] = profiles
        return {name: _plain(value) for name, value in variables.items() if value is not None}


def _plain(value: Path | SecretStr | str) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else str(value)


def shown(text: str) -> str:
    """A URI, or a text of a library, as it may stand in a log: without the user and password of a URI, and without the
    value of a secret setting (libraries quote a token that has a line break at its end)."""
    for value in vars(Settings()).values():
        if isinstance(value, SecretStr) and len(secret := value.get_secret_value().strip()) >= SHORTEST_SECRET:
            text = text.replace(secret, "***")
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def apply_environment() -> None:
    """Set what is not set yet, and make the folder for temporary files.

    Comes before the first import of Prefect, which reads PREFECT_HOME on import. A storage root that cannot be written
    is no error here: the preflight says so in a sentence.
    """
    settings = Settings()
    for name, value in settings.environment().items():
        os.environ.setdefault(name, value)
    with suppress(OSError):
        (settings.storage_root / "tmp").mkdir(parents=True, exist_ok=True)
