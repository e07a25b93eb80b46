"""A stand-in for Unity Catalog: the three dialects that MLflow's clients speak, and the storage behind them.

python -m tests.unity_catalog PORT FOLDER

- `databricks-uc`, legacy: /api/2.0/mlflow/unity-catalog
- `databricks-uc`, native (MLFLOW_ENABLE_UC_NATIVE_MODEL_REGISTRY): /api/2.1/unity-catalog
- `uc:`, the open-source server: /api/2.1/unity-catalog, without tags and aliases
- Files API and presigned URLs: /api/2.0/fs, with uploads in parts
- an S3 bucket `models`

Catalogs are `main`, whose storage is FOLDER, and `cloud`, whose storage is the bucket; each has the schema `default`.
There is the volume `main.default.checkpoints`. Tag keys may have the characters that Databricks documents.

Faults come by POST /_faults, a list of `Fault`s as JSON; GET /_state has the models, GET /_calls all requests so far.
"""

import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
import xml.sax.saxutils
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import psutil

SCHEMAS = {"main": ["default"], "cloud": ["default"]}
VOLUME = "Volumes/main/default/checkpoints"
BUCKET = "models"
LEGACY, NATIVE, FILES = "/api/2.0/mlflow/unity-catalog", "/api/2.1/unity-catalog", "/api/2.0/fs"
PENDING, READY = "PENDING_REGISTRATION", "READY"
MOST_TAGS = 50


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD path" matches, the first `skip` excepted."""

    match: str
    times: int = 1
    skip: int = 0
    status: int = 0
    code: str = "INTERNAL_ERROR"
    message: str = "injected fault"
    hang: float = 0
    """Seconds of silence."""
    cut: bool = False
    """The connection breaks; of an upload, in the middle, and half a file stays."""
    kill: bool = False
    """The process that asks gets a SIGKILL."""
    after: bool = False
    """The request is done first, and only its answer is lost."""


@dataclass
class Version:
    number: int
    location: str
    source: str
    run_id: str
    comment: str
    tags: dict[str, str]
    status: str = PENDING
    created: int = field(default_factory=lambda: int(time.time() * 1000))


@dataclass
class Model:
    name: str
    comment: str
    tags: dict[str, str]
    versions: dict[int, Version] = field(default_factory=dict)
    aliases: dict[str, int] = field(default_factory=dict)
    newest: int = 0
    """Numbers of deleted versions are not used again."""


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str):
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


class Catalog:
    """Models and versions, as all dialects see them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.models: dict[str, Model] = {}

    def model(self, name: str) -> Model:
        if name not in self.models:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"Registered model '{name}' does not exist.")
        return self.models[name]

    def version(self, name: str, number: Any) -> Version:
        if int(number) not in self.model(name).versions:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"Version {number} of '{name}' does not exist.")
        return self.model(name).versions[int(number)]

    def create_model(self, name: str, comment: str, tags: list[dict[str, str]]) -> Model:
        if name.count(".") != 2:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"'{name}': please specify all three levels")
        catalog, schema, _ = name.split(".")
        if catalog not in SCHEMAS:
            raise Refused(404, "CATALOG_DOES_NOT_EXIST", f"Catalog '{catalog}' does not exist.")
        if schema not in SCHEMAS[catalog]:
            raise Refused(404, "SCHEMA_DOES_NOT_EXIST", f"Schema '{catalog}.{schema}' does not exist.")
        if name in self.models:
            raise Refused(400, "RESOURCE_ALREADY_EXISTS", f"Registered model '{name}' already exists.")
        self.models[name] = Model(name, comment, checked(tags))
        return self.models[name]

    def create_version(self, name: str, request: dict[str, Any], comment: str) -> Version:
        model = self.model(name)
        model.newest += 1
        path = f"Models/{name.replace('.', '/')}/{model.newest}"
        location = f"s3://{BUCKET}/{path}" if name.startswith("cloud.") else f"file:{self.folder / path}"
        tags = checked(request.get("tags", []))
        source, run_id = request.get("source", ""), request.get("run_id", "")
        version = Version(model.newest, location, source, run_id, comment, tags)
        model.versions[model.newest] = version
        if location.startswith("file:"):
            (self.folder / path).mkdir(parents=True)
        return version

    def finalize(self, name: str, number: Any) -> Version:
        version = self.version(name, number)
        if version.status != PENDING:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"Version {number} of '{name}' is {version.status}.")
        version.status = READY
        return version

    def delete_version(self, name: str, number: Any) -> None:
        del self.model(name).versions[self.version(name, number).number]
        self.model(name).aliases = {a: at for a, at in self.model(name).aliases.items() if at != int(number)}

    def at_alias(self, name: str, alias: str) -> Version:
        if alias not in self.model(name).aliases:
            raise Refused(404, "RESOURCE_DOES_NOT_EXIST", f"Alias '{alias}' of '{name}' does not exist.")
        return self.version(name, self.model(name).aliases[alias])

    def credentials(self, name: str) -> dict[str, Any]:
        if not name.startswith("cloud."):
            return {"storage_mode": "DEFAULT_STORAGE"}
        keys = {"access_key_id": "vended", "secret_access_key": "vended", "session_token": "vended"}
        return {"aws_temp_credentials": keys}


def checked(tags: list[dict[str, str]]) -> dict[str, str]:
    for tag in tags:
        if re.search("[.,=/:-]", tag["key"]):
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"Tag key '{tag['key']}' has a character of . , - = / :")
        if len(tag.get("value", "")) > 1000:
            raise Refused(400, "INVALID_PARAMETER_VALUE", f"The value of tag '{tag['key']}' is too long.")
    if len(tags) > MOST_TAGS:
        raise Refused(400, "INVALID_PARAMETER_VALUE", f"more than {MOST_TAGS} tags")
    return {tag["key"]: tag.get("value", "") for tag in tags}


def pairs(values: dict[str, Any], key: str = "key", value: str = "value") -> list[dict[str, Any]]:
    return [{key: one, value: other} for one, other in values.items()]


def aliases_of(model: Model, version: Version | None = None) -> dict[str, int]:
    return {alias: at for alias, at in model.aliases.items() if version is None or at == version.number}


class Legacy:
    """The dialect of /api/2.0: whole names in the body, versions as text."""

    def __init__(self, catalog: Catalog):
        self.catalog = catalog

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        catalog, name = self.catalog, body.get("name", "")
        match method, path.strip("/").split("/"):
            case _, [asked] if asked.endswith("is-databricks-sdk-models-artifact-repository-enabled"):
                return {"is_databricks_sdk_models_artifact_repository_enabled": False}
            case "POST", ["registered-models", "create"]:
                model = catalog.create_model(name, body.get("description", ""), body.get("tags", []))
                return {"registered_model": self.model(model)}
            case "GET", ["registered-models", "get"]:
                return {"registered_model": self.model(catalog.model(name))}
            case "POST", ["registered-models", "alias"]:
                catalog.model(name).aliases[body["alias"]] = catalog.version(name, body["version"]).number
                return {}
            case "DELETE", ["registered-models", "alias"]:
                catalog.model(name).aliases.pop(body["alias"], None)
                return {}
            case "GET", ["registered-models", "alias"]:
                return {"model_version": self.version(name, catalog.at_alias(name, body["alias"]))}
            case "POST", ["model-versions", "create"]:
                version = catalog.create_version(name, body, body.get("description", ""))
                return {"model_version": self.version(name, version)}
            case "GET", ["model-versions", "search"]:
                name = re.fullmatch(r"name\s*=\s*'([^']+)'", body["filter"])[1]
                found = catalog.models[name].versions.values() if name in catalog.models else []
                hits = [self.version(name, version) for version in found]
                return {"model_versions": [{**hit, "tags": [], "aliases": []} for hit in hits]}
            case "GET", ["model-versions", "get"]:
                return {"model_version": self.version(name, catalog.version(name, body["version"]))}
            case "GET", ["model-versions", "get-download-uri"]:
                return {"artifact_uri": catalog.version(name, body["version"]).location}
            case "POST", ["model-versions", "generate-temporary-credentials"]:
                return {"credentials": catalog.credentials(name)}
            case "POST", ["model-versions", "finalize"]:
                return {"model_version": self.version(name, catalog.finalize(name, body["version"]))}
            case "POST", ["model-versions", "set-tag"]:
                catalog.version(name, body["version"]).tags.update(checked([body]))
                return {}
            case "PATCH", ["model-versions", "update"]:
                version = catalog.version(name, body["version"])
                version.comment = body.get("description", "")
                return {"model_version": self.version(name, version)}
            case "DELETE", ["model-versions", "delete"]:
                catalog.delete_version(name, body["version"])
                return {}
            case "POST", ["model-versions", "emit-lineage"]:
                return {}
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"{method} {path}")

    def model(self, model: Model) -> dict[str, Any]:
        aliases = pairs({alias: str(at) for alias, at in model.aliases.items()}, "alias", "version")
        return {"name": model.name, "description": model.comment, "tags": pairs(model.tags), "aliases": aliases}

    def version(self, name: str, version: Version) -> dict[str, Any]:
        own = aliases_of(self.catalog.model(name), version)
        return {
            "name": name, "version": str(version.number), "status": version.status, "source": version.source,
            "run_id": version.run_id, "description": version.comment, "storage_location": version.location,
            "creation_timestamp": version.created, "tags": pairs(version.tags),
            "aliases": pairs({alias: str(at) for alias, at in own.items()}, "alias", "version"),
        }  # fmt: skip


class Native:
    """The dialect of /api/2.1: names in three parts or in the path, versions as numbers."""

    def __init__(self, catalog: Catalog):
        self.catalog = catalog

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        catalog = self.catalog
        name = ".".join(str(body.get(part)) for part in ("catalog_name", "schema_name", "model_name"))
        match method, path.strip("/").split("/"):
            case "POST", ["models"]:
                name = ".".join(body[part] for part in ("catalog_name", "schema_name", "name"))
                return self.model(catalog.create_model(name, body.get("comment", ""), body.get("tags", [])))
            case "GET", ["models", name]:
                return self.model(catalog.model(name))
            case "POST", ["models", "versions"]:
                return self.version(name, catalog.create_version(name, body, body.get("comment", "")))
            case "GET", ["models", name, "versions"]:
                hits = [self.version(name, version) for version in catalog.model(name).versions.values()]
                return {"model_versions": [{**hit, "tags": [], "aliases": []} for hit in hits]}
            case "GET", ["models", name, "versions", number]:
                return self.version(name, catalog.version(name, number))
            case "PATCH", ["models", name, "versions", number, "finalize"]:
                return self.version(name, catalog.finalize(name, number))
            case "PATCH", ["models", name, "versions", number]:
                version = catalog.version(name, number)
                version.comment = body.get("comment", "")
                return self.version(name, version)
            case "DELETE", ["models", name, "versions", number]:
                catalog.delete_version(name, number)
                return {}
            case "POST", ["temporary-model-version-credentials"]:
                return catalog.credentials(name)
            case "PUT", ["models", name, "aliases", alias]:
                catalog.model(name).aliases[alias] = catalog.version(name, body["version_num"]).number
                return {}
            case "DELETE", ["models", name, "aliases", alias]:
                catalog.model(name).aliases.pop(alias, None)
                return {}
            case "GET", ["models", name, "aliases", alias]:
                return self.version(name, catalog.at_alias(name, alias))
            case "PATCH", ["subentity-tags", _, name, number]:
                catalog.version(name, number).tags.update(checked(body["changes"].get("add_tags", [])))
                return {}
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"{method} {path}")

    def model(self, model: Model) -> dict[str, Any]:
        catalog, schema, name = model.name.split(".")
        return {
            "name": name, "catalog_name": catalog, "schema_name": schema, "full_name": model.name,
            "comment": model.comment, "tags": pairs(model.tags),
            "aliases": pairs(model.aliases, "alias_name", "version_num"),
        }  # fmt: skip

    def version(self, full_name: str, version: Version) -> dict[str, Any]:
        catalog, schema, name = full_name.split(".")
        own = aliases_of(self.catalog.model(full_name), version)
        return {
            "model_name": name, "catalog_name": catalog, "schema_name": schema, "version": version.number,
            "status": version.status, "source": version.source, "run_id": version.run_id, "comment": version.comment,
            "storage_location": version.location, "created_at": version.created, "tags": pairs(version.tags),
            "aliases": pairs(own, "alias_name", "version_num"),
        }  # fmt: skip


class Files:
    """The Files API: files and directories, presigned URLs, and uploads in parts."""

    def __init__(self, folder: Path, host: str):
        self.folder, self.host = folder, host
        self.parts: dict[str, dict[int, bytes]] = {}
        """Session token, which is the file's path -> number -> content."""

    def answer(self, method: str, path: str, body: Any, query: dict[str, str]) -> Any:
        if "/Volumes/" in path and f"/{VOLUME}/" not in path:
            raise Refused(404, "NOT_FOUND", f"Volume '{'.'.join(path.split('/')[3:6])}' does not exist.")
        match method, path.strip("/").split("/", 1):
            case "POST", ["create-upload-url" | "create-download-url"]:
                return {"url": f"{self.host}/_blob{body['path']}", "headers": []}
            case "POST", ["create-upload-part-urls"]:
                first, url = body["start_part_number"], f"{self.host}/_part{body['session_token']}"
                numbers = range(first, first + body["count"])
                return {"upload_part_urls": [{"url": f"{url}?part={n}", "part_number": n} for n in numbers]}
            case "POST", ["files", name] if query["action"] == "initiate-upload":
                self.parts[f"/{name}"] = {}
                return {"multipart_upload": {"session_token": f"/{name}"}}
            case "POST", ["files", name] if query["action"] == "complete-upload":
                parts = self.parts.pop(f"/{name}")
                self.write(name, b"".join(parts[number] for number in sorted(parts)))
                return {}
            case "PUT", ["files", name]:
                return self.write(name, body)
            case "GET" | "HEAD", ["files", name]:
                return self.read(name)
            case "DELETE", ["files", name]:
                self.existing(name).unlink()
                return {}
            case "PUT", ["directories", name]:
                (self.folder / name).mkdir(parents=True, exist_ok=True)
                return {}
            case "HEAD", ["directories", name]:
                self.existing(name, Path.is_dir)
                return {}
            case "GET", ["directories", name]:
                return {"contents": [self.entry(file) for file in sorted(self.existing(name, Path.is_dir).iterdir())]}
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"{method} {path}")

    def entry(self, file: Path) -> dict[str, Any]:
        path = f"/{file.relative_to(self.folder)}"
        size = {} if file.is_dir() else {"file_size": file.stat().st_size}
        return {"path": path, "name": file.name, "is_directory": file.is_dir(), **size}

    def existing(self, name: str, kind: Callable[[Path], bool] = Path.is_file) -> Path:
        if not kind(self.folder / name):
            raise Refused(404, "NOT_FOUND", f"/{name} does not exist.")
        return self.folder / name

    def write(self, name: str, content: bytes) -> dict[str, Any]:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content)
        return {}

    def read(self, name: str) -> bytes:
        return self.existing(name).read_bytes()

    def bucket(self, method: str, key: str, body: bytes, query: dict[str, str]) -> Any:
        """As much of S3 as uploading and downloading a directory takes."""
        match method:
            case "PUT":
                self.write(key, body)
                return b""
            case "GET" if not key:
                prefix = query.get("prefix", "")
                return self.listing(prefix).encode()
            case "GET" | "HEAD":
                return self.read(key) if key else b""
        raise Refused(404, "NoSuchKey", key)

    def listing(self, prefix: str) -> str:
        folder, found = self.folder / prefix, []
        for file in sorted(folder.iterdir()) if prefix.endswith("/") and folder.is_dir() else []:
            key = xml.sax.saxutils.escape(prefix + file.name)
            if file.is_dir():
                found.append(f"<CommonPrefixes><Prefix>{key}/</Prefix></CommonPrefixes>")
            else:
                found.append(f"<Contents><Key>{key}</Key><Size>{file.stat().st_size}</Size></Contents>")
        return f"<ListBucketResult><Name>{BUCKET}</Name>{''.join(found)}</ListBucketResult>"


class Handler(BaseHTTPRequestHandler):
    """One request: its fault if there is one, and its answer."""

    protocol_version = "HTTP/1.1"
    catalog: Catalog
    files: Files
    faults: list[Fault]
    calls: list[str]
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def handle_one(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), dict(parse_qsl(url.query, keep_blank_values=True))
        fault = None if path.startswith("/_faults") else self.fault(f"{self.command} {path}")
        if fault and not fault.after and self.suffers(fault, path):
            return
        body = self.body()
        try:
            with self.lock:
                status, answer = 200, self.answer(path, query, body)
        except Refused as refused:
            status, answer = refused.status, {"error_code": refused.code, "message": refused.message}
        if fault and fault.after and self.suffers(fault, path):
            return
        self.send(status, answer)

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = do_HEAD = handle_one

    def answer(self, path: str, query: dict[str, str], content: bytes) -> Any:
        is_file = path.startswith(("/_blob/", "/_part/", f"{FILES}/files/", f"/{BUCKET}")) and self.command == "PUT"
        body = content if is_file else json.loads(content) if content else query
        match path:
            case "/_faults":
                self.faults[:] = [Fault(**fault) for fault in body]
                return {}
            case "/_state":
                return {name: asdict(model) for name, model in self.catalog.models.items()}
            case "/_calls":
                return self.calls
            case "/.well-known/databricks-config":
                return {"oidc_endpoint": "", "workspace_id": "1"}
        self.calls.append(f"{self.command} {path}")
        for prefix, dialect in ((LEGACY, Legacy), (NATIVE, Native)):
            if path.startswith(prefix):
                return dialect(self.catalog).answer(self.command, path.removeprefix(prefix), body)
        if path.startswith(FILES):
            return self.files.answer(self.command, path.removeprefix(FILES), body, query)
        if path.startswith("/_blob/"):
            name = path.removeprefix("/_blob/")
            return self.files.write(name, body) if self.command == "PUT" else self.files.read(name)
        if path.startswith("/_part/"):
            self.files.parts[path.removeprefix("/_part")][int(query["part"])] = body
            return {}
        if path.strip("/").split("/")[0] == BUCKET:
            return self.files.bucket(self.command, path.removeprefix(f"/{BUCKET}").strip("/"), body, query)
        raise Refused(404, "ENDPOINT_NOT_FOUND", f"{self.command} {path}")

    def fault(self, request: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and re.search(fault.match, request):
                    if fault.skip:
                        fault.skip -= 1
                        continue
                    fault.times -= 1
                    return fault
        return None

    def suffers(self, fault: Fault, path: str) -> bool:
        """Whether the request ends here."""
        if fault.kill:
            os.kill(self.asking(), signal.SIGKILL)
        time.sleep(fault.hang)
        if fault.cut and not fault.after:
            half = self.rfile.read(int(self.headers.get("Content-Length") or 0) // 2)
            if half and path.startswith(f"{FILES}/files/"):
                self.files.write(path.removeprefix(f"{FILES}/files/"), half)
        if fault.cut or fault.kill:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            self.close_connection = True
            return True
        if fault.status:
            if not fault.after:
                self.body()
            self.send(fault.status, {"error_code": fault.code, "message": fault.message})
        return bool(fault.status)

    def asking(self) -> int:
        """The process at the other end of the connection."""
        return next(
            connection.pid
            for connection in psutil.net_connections("tcp4")
            if connection.laddr == self.client_address and connection.pid
        )

    def body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def send(self, status: int, answer: Any) -> None:
        if status >= 400 and self.path.startswith(f"/{BUCKET}"):
            code = "AccessDenied" if status == 403 else answer["error_code"]
            answer = f"<Error><Code>{code}</Code><Message>{answer['message']}</Message></Error>".encode()
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"etag"')
        self.send_header("x-amz-bucket-region", "us-east-1")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def main() -> None:
    port, folder = int(sys.argv[1]), Path(sys.argv[2]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    Handler.catalog, Handler.files = Catalog(folder), Files(folder, f"http://127.0.0.1:{port}")
    Handler.faults, Handler.calls = [], []
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
