"""A small HTTP server with the paths, status codes and bodies of Kubernetes' API server, for the official client.

It keeps objects, refuses what is there already, answers 404 for what is not, and sets deletionTimestamp on an owner
whose pods still end. Nothing is scheduled: a test says what its pods are.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUPS = ("/api/v1", "/apis/batch/v1", "/apis/policy/v1")


class FakeApi:
    """What the server holds: objects by path, pods and their logs, nodes with their labels; `asked` are the requests in
    order, and `refused` the ends of paths that this user may not use."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.pods: list[dict[str, Any]] = []
        self.logs: dict[str, str] = {}
        self.groups = [*GROUPS]
        self.nodes: dict[str, dict[str, str]] = {}
        self.refused: set[str] = set()
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        url = urlsplit(target)
        path, query = url.path, {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append(f"{method} {path}")
        if any(path.endswith(f"/{end}") for end in self.refused):
            return 403, status(403, f"{path} is forbidden")
        if path == "/api/v1/nodes":
            items = [{"metadata": {"name": name, "labels": labels}} for name, labels in self.nodes.items()]
            return 200, {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": items}
        if not any(path.startswith(f"{group}/namespaces/") for group in self.groups):
            return 404, "404 page not found"
        if path.endswith("/log"):
            name = path.split("/")[-2]
            return (200, self.logs[name]) if name in self.logs else (404, status(404, f"pods {name} not found"))
        if path.endswith("/pods"):
            label, _, value = query["labelSelector"].partition("=")
            found = [pod for pod in self.pods if pod["metadata"]["labels"].get(label) == value]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}
        return {"GET": self._read, "POST": self._create, "DELETE": self._delete}[method](path, body)

    def _read(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path.rpartition("/")[0].endswith("/namespaces/ml"):  # a list of them
            return 200, {"kind": "List", "apiVersion": "v1", "metadata": {}, "items": []}
        found = self.objects.get(path)
        return (200, found) if found else (404, status(404, f"{path} not found"))

    def _create(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        where = f"{path}/{body['metadata']['name']}"
        if where in self.objects:
            return 409, status(409, f"{where} already exists")
        self.bodies.append(body)
        made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{len(self.bodies)}"}}
        self.objects[where] = made
        return 201, made

    def _delete(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path not in self.objects:
            return 404, status(404, f"{path} not found")
        if self.pods and path.endswith(
            tuple(f"jobs/{pod['metadata']['labels']['armillary.job']}" for pod in self.pods)
        ):
            self.objects[path]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"  # Foreground: pods go first
            return 200, self.objects[path]
        return 200, self.objects.pop(path)

    def all_gone(self) -> None:
        """The pods have ended, and with them what waited for that; the cluster deletes what it owned."""
        self.pods.clear()
        self.objects = {
            path: each for path, each in self.objects.items() if "deletionTimestamp" not in each["metadata"]
        }
        there = {each["metadata"]["uid"] for each in self.objects.values()}
        self.objects = {
            path: each
            for path, each in self.objects.items()
            if all(owner["uid"] in there for owner in each["metadata"].get("ownerReferences", []))
        }


def status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}


@contextmanager
def running_api(api: FakeApi | None = None) -> Iterator[tuple[FakeApi, str]]:
    """The server's contents and its address."""
    api = api or FakeApi()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            code, value = api.answer(self.command, self.path, body)
            text = value if isinstance(value, str) else json.dumps(value)
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = do_DELETE = _handle

        def log_message(self, format: str, *values: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield api, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
