"""Where in a browser a run or a version is to be seen, and the command that shows it where nothing serves it."""

import re
from urllib.parse import quote

from config.settings import Settings, shown


def run_url(run_id: str, experiment_id: str | None) -> str | None:
    """Of an MLflow run; None when its server has no address for a browser."""
    server, host = Settings().tracking_uri, Settings().databricks_host
    if experiment_id is None:
        return None
    if _is_http(server):
        return f"{_base(server)}/#/experiments/{experiment_id}/runs/{run_id}"
    if server == "databricks" and host:
        return f"{_base(host)}/ml/experiments/{experiment_id}/runs/{run_id}"
    return None


def version_url(name: str, number: str) -> str | None:
    """Of a registered version."""
    registry, host = Settings().registry_uri, Settings().databricks_host
    if _is_http(registry):
        return f"{_base(registry)}/#/models/{quote(name)}/versions/{number}"
    if registry == "databricks-uc" and host:
        return f"{_base(host)}/explore/data/models/{quote(name.replace('.', '/'))}/version/{number}"
    return None


def show_command(uri: str) -> str | None:
    """What opens MLflow's UI on a database, which has no address by itself."""
    return f"mlflow ui --backend-store-uri {shown(uri)}" if uri.startswith(("sqlite", "postgres", "mysql")) else None


def _is_http(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


def _base(uri: str) -> str:
    """Without user and password, which a browser asks for itself."""
    return re.sub(r"//[^/@\s]+@", "//", uri).rstrip("/")
