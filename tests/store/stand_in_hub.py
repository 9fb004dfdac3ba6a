"""A stand-in for the Hugging Face Hub on loopback: the few routes a download uses, and a log of what was asked.

Repositories are dicts of commits; a gated one answers only to its token, as the real one does.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_INFO = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/revision/(?P<revision>.+)")
_TREE = re.compile(r"/api/models/(?P<id>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)")
_FILE = re.compile(r"/(?P<id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repository:
    """Files by commit, branches and tags by name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class StandInHub:
    """The server and what it holds."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[str] = []
        self.broken_with: int | None = None
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    def add(self, name: str, files: dict[str, bytes], *, ref: str = "main", token: str | None = None) -> str:
        """Commit `files` and point `ref` at them; gives the commit."""
        listing = "".join(f"{path} {hashlib.sha1(data).hexdigest()}\n" for path, data in sorted(files.items()))
        commit = hashlib.sha1(listing.encode()).hexdigest()
        repository = self.repositories.setdefault(name, Repository(token=token))
        repository.commits[commit] = files
        repository.refs[ref] = commit
        return commit

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def downloads(self) -> set[str]:
        """Files whose content was sent."""
        return {line.rpartition("/")[2] for line in self.asked if line.startswith("GET") and "/resolve/" in line}

    def stop(self) -> None:
        """As when the network goes away."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandInHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.stand_in.asked.append(f"{self.command} {path}")
        match = _INFO.fullmatch(path) or _TREE.fullmatch(path) or _FILE.fullmatch(path)
        if self.stand_in.broken_with is not None:
            return self._send(self.stand_in.broken_with, b"out of order")
        repository = self.stand_in.repositories.get(match["id"]) if match else None
        if match is None or repository is None:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            return self._send(401, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
        commit = repository.commit_of(match["revision"])
        if commit is None:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev"})
        files = repository.commits[commit]
        if match.re is _FILE:
            return self._send_file(commit, files.get(match["path"]))
        return self._send_json(_info(match["id"], commit, files) if match.re is _INFO else _tree(files))

    def _send_json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send_file(self, commit: str, data: bytes | None) -> None:
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        self._send(200, data, {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _info(name: str, commit: str, files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "_id": "1",
        "id": name,
        "modelId": name,
        "sha": commit,
        "private": False,
        "gated": False,
        "downloads": 0,
        "likes": 0,
        "tags": [],
        "siblings": [{"rfilename": path} for path in files],
    }


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for path, data in files.items()
    ]
