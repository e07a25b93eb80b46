"""As much of the hub's HTTP API as `huggingface_hub` and `datasets` ask for, on 127.0.0.1.

A gated repository shows its commit to everybody, and its files to nobody. What is asked for and unknown is noted.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

ROUTE = re.compile(
    r"/(?:api/(?=datasets|models))?(?:(datasets|models)/)?(?!api/)([\w.-]+/[\w.-]+)(?:/([\w-]+)(?:/(.+))?)?"
)
"""Kind, id, what of it, and the revision with the path."""


class Repository(NamedTuple):
    commit: str
    files: dict[str, bytes]
    is_gated: bool = False


class Hub(ThreadingHTTPServer):
    """`repositories`: ("dataset" or "model", id) -> its branch `main`, the only one that there is."""

    def __init__(self, repositories: dict[tuple[str, str], Repository]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = repositories
        self.unknown: list[str] = []
        self.sent: Counter[str] = Counter()
        """Path of a file -> bytes that were sent of it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve(repositories: dict[tuple[str, str], Repository]) -> Iterator[Hub]:
    hub = Hub(repositories)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        route = ROUTE.fullmatch(self.path.partition("?")[0])
        kind, name, what, rest = route.groups() if route else (None, None, None, None)
        repository = self.server.repositories.get(("dataset" if kind == "datasets" else "model", name))
        revision, _, path = (rest or "main").partition("/")
        if not route:
            self.server.unknown.append(f"{self.command} {self.path}")
            self.refuse(404, "")
        elif not repository:
            self.refuse(401, "RepoNotFound")  # so the hub answers whoever has no token
        elif revision not in ("main", repository.commit):
            self.refuse(404, "RevisionNotFound")
        elif repository.is_gated and what in ("auth-check", "resolve"):
            self.refuse(401, "GatedRepo")
        elif what == "resolve":
            self.file(repository, path)
        elif what == "tree":
            self.answer([entry(*file) for file in repository.files.items() if file[0].startswith(path)])
        else:
            siblings = [{"rfilename": path} for path in repository.files]
            facts = {"id": name, "sha": repository.commit, "gated": "auto" if repository.is_gated else False}
            self.answer({**facts, "private": False, "tags": [], "siblings": siblings})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """What there is at some paths, which is how `datasets` looks before it streams."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["paths"]
        kind, name, what, _ = ROUTE.fullmatch(self.path).groups()
        repository = self.server.repositories.get(("dataset" if kind == "datasets" else "model", name))
        if not repository or what != "paths-info":
            self.server.unknown.append(f"{self.command} {self.path}")
            return self.refuse(404, "")
        return self.answer([entry(*file) for file in repository.files.items() if file[0] in asked])

    def file(self, repository: Repository, path: str) -> None:
        content = repository.files.get(path)
        if content is None:
            return self.refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{digest(content)}"'}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            if start >= len(content):
                return self.answer(b"", headers, 416)
            content = content[start : end + 1]
        if self.command == "GET":
            self.server.sent[path] += len(content)
        return self.answer(content, headers, 206 if "Content-Range" in headers else 200)

    def answer(self, body: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.answer({"error": code}, {"X-Error-Code": code, "X-Error-Message": code}, status)

    def log_message(self, *_: Any) -> None:
        pass


def digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": digest(content)}
