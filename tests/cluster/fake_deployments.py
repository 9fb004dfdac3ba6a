"""The API server of fake_api_server.py with a Deployment controller and a kubelet: a Deployment of one replica gets a
pod, which is a real server process with an address of its own (127.0.0.2, .3 …, all loopback on Linux).

As the real ones: a pod that ends is replaced by another with a new name and address; a deleted Deployment stays, with a
deletionTimestamp, until its pod has ended after SIGTERM (Foreground); a pod deleted with a grace period of 0 gets
SIGKILL; Ready follows the pod's /ready. Not as the real ones: nothing is scheduled, and images are not pulled.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from armillary.fleet.pool.local_pool import is_ready
from tests.cluster.fake_api_server import FakeApi, status

APPS = "/apps/v1/namespaces/"
Start = Callable[[str, int, list[str]], list[str]]
"""(address, port, arguments of the container) -> command line of a pod's process"""


class FakeDeployments(FakeApi):
    """What the server holds, Deployments and their pods included."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.groups.append("/apis/apps/v1")
        self._start, self._lock, self._pods = start, threading.Lock(), 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def answer(self, method: str, target: str, body: dict[str, Any]) -> tuple[int, Any]:
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self._lock:
            self._reconcile()
            if APPS in url.path:
                self.asked.append(f"{method} {url.path}")
                return self._deployment(method, url.path, query, body)
            if url.path.endswith("/pods"):
                found = [pod for pod in self.pods if selected(pod, query.get("labelSelector", ""))]
                return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}
            if "/pods/" in url.path and method == "DELETE":
                return self._kill(url.path.rpartition("/")[2])
            if method == "PUT":
                self.objects[url.path] = body
                return 200, body
            return super().answer(method, target, body)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    # --- Deployments

    def _deployment(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        if method == "POST":
            body["metadata"]["creationTimestamp"] = now()
            code, made = self._create(path, body)
            self._reconcile()
            return code, made
        if path.endswith("/deployments"):
            here = [each for where, each in self.objects.items() if where.startswith(f"{path}/")]
            found = [each for each in here if selected(each, query.get("labelSelector", ""))]
            return 200, {"kind": "DeploymentList", "apiVersion": "apps/v1", "metadata": {}, "items": found}
        if path not in self.objects:
            return 404, status(404, f"{path} not found")
        if method == "DELETE":
            self.objects[path]["metadata"].setdefault("deletionTimestamp", now())
            for pod in self._pods_of(self.objects[path]):
                pod["metadata"].setdefault("deletionTimestamp", now())
                self.processes[pod["metadata"]["name"]].terminate()
        return 200, self.objects[path]

    def _reconcile(self) -> None:
        """One round of the controllers."""
        for pod in list(self.pods):
            if self.processes[pod["metadata"]["name"]].poll() is not None:
                self.pods.remove(pod)
            elif not pod["status"]["conditions"] and is_ready(f"http://{pod['status']['podIP']}:8000"):
                pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": now()}]
        for path, each in list(self.objects.items()):
            if APPS not in path or self._pods_of(each):
                continue
            if "deletionTimestamp" in each["metadata"]:
                del self.objects[path]
            else:
                self._begin_pod(each)

    def _pods_of(self, deployment: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = deployment["spec"]["selector"]["matchLabels"]
        return [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]

    def _begin_pod(self, deployment: dict[str, Any]) -> None:
        self._pods += 1
        template, address = deployment["spec"]["template"], f"127.0.0.{self._pods + 1}"
        name = f"{deployment['metadata']['name']}-{self._pods}"
        command = self._start(address, 8000, template["spec"]["containers"][0]["args"])
        self.processes[name] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        meta = {"name": name, "uid": name, "creationTimestamp": now(), "labels": dict(template["metadata"]["labels"])}
        self.pods.append({"metadata": meta, "status": {"podIP": address, "conditions": []}})

    def _kill(self, name: str) -> tuple[int, Any]:
        pod = next((each for each in self.pods if each["metadata"]["name"] == name), None)
        if pod is None:
            return 404, status(404, f"pods {name} not found")
        self.processes[name].kill()
        self.processes[name].wait()
        return 200, pod


def selected(item: dict[str, Any], selector: str) -> bool:
    """A label selector of equalities and names."""
    labels = item["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, given, value = term.partition("=")
        if name not in labels or (given and labels[name] != value):
            return False
    return True


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
