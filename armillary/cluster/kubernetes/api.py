"""The API server of a Kubernetes cluster through the official client: objects as plain dictionaries, one-line errors.

Objects outside of the core group all have the same paths, so that one interface of the client serves Jobs, JobSets and
TrainJobs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from armillary.cluster.commands import TargetFailed
from armillary.cluster.kubernetes.manifests import Manifest
from armillary.errors import missing, one_line

PLURALS = {
    "ConfigMap": "configmaps",
    "Deployment": "deployments",
    "Job": "jobs",
    "JobSet": "jobsets",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Service": "services",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
}
_CORE = {"ConfigMap": "config_map", "Service": "service"}
_NOT_FOUND, _CONFLICT = 404, 409
_TIMEOUT_S = 30.0


class Cluster:
    """One namespace of the cluster that the kubeconfig, or the pod this runs in, leads to."""

    def __init__(self, namespace: str = "") -> None:
        client, config = _client()
        try:
            current = _configure(config)
        except config.ConfigException as error:
            raise TargetFailed(
                f"no Kubernetes cluster is configured here ({one_line(error, 200)}); try kubectl get nodes by hand"
            ) from None
        self.namespace = namespace or current or "default"
        self._core, self._custom, self._error = client.CoreV1Api(), client.CustomObjectsApi(), client.ApiException

    def create(self, manifest: Manifest) -> Manifest | None:
        """The object as the server has it (of the core group as it was given); None where one of this name is there."""
        kind = manifest["kind"]
        with self._said(f"create {kind} {manifest['metadata']['name']}"):
            try:
                if kind in _CORE:
                    create: Callable[..., Any] = getattr(self._core, f"create_namespaced_{_CORE[kind]}")
                    create(self.namespace, manifest, _request_timeout=_TIMEOUT_S)
                    return manifest
                created: Manifest = self._custom.create_namespaced_custom_object(
                    *_group(manifest), self.namespace, PLURALS[kind], manifest, _request_timeout=_TIMEOUT_S
                )
                return created
            except self._error as error:
                if error.status == _CONFLICT:
                    return None
                raise

    def read(self, manifest: Manifest) -> Manifest | None:
        """The object of this kind and name, outside of the core group; None where there is none."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        with self._said(f"read {kind} {name}"):
            try:
                current: Manifest = self._custom.get_namespaced_custom_object(
                    *_group(manifest), self.namespace, PLURALS[kind], name, _request_timeout=_TIMEOUT_S
                )
            except self._error as error:
                if error.status == _NOT_FOUND:
                    return None
                raise
        return current

    def delete(self, manifest: Manifest) -> None:
        """Delete it after its pods, which are asked to end first; nothing happens where it is gone."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        options: dict[str, Any] = {"propagation_policy": "Foreground", "_request_timeout": _TIMEOUT_S}
        with self._said(f"delete {kind} {name}"):
            try:
                if kind in _CORE:
                    getattr(self._core, f"delete_namespaced_{_CORE[kind]}")(name, self.namespace, **options)
                else:
                    self._custom.delete_namespaced_custom_object(
                        *_group(manifest), self.namespace, PLURALS[kind], name, **options
                    )
            except self._error as error:
                if error.status != _NOT_FOUND:
                    raise

    def listed(self, api_version: str, kind: str, label: str) -> list[Manifest]:
        """Objects of this kind with this label, outside of the core group."""
        with self._said(f"list {PLURALS[kind]}"):
            answer: Manifest = self._custom.list_namespaced_custom_object(
                *api_version.split("/"),
                self.namespace,
                PLURALS[kind],
                label_selector=label,
                _request_timeout=_TIMEOUT_S,
            )
        items: list[Manifest] = answer["items"]
        return items

    def replace_config(self, manifest: Manifest) -> None:
        """A ConfigMap as given, whether or not one of its name is there."""
        if self.create(manifest) is None:
            name = manifest["metadata"]["name"]
            with self._said(f"replace ConfigMap {name}"):
                self._core.replace_namespaced_config_map(name, self.namespace, manifest, _request_timeout=_TIMEOUT_S)

    def kill_pod(self, name: str) -> None:
        """End a pod without grace; nothing happens where it is gone."""
        with self._said(f"delete pod {name}"):
            try:
                self._core.delete_namespaced_pod(
                    name, self.namespace, grace_period_seconds=0, _request_timeout=_TIMEOUT_S
                )
            except self._error as error:
                if error.status != _NOT_FOUND:
                    raise

    def serves(self, api_version: str, kind: str) -> bool:
        """Whether objects of this kind can be created here."""
        group, version = api_version.split("/")
        with self._said(f"list what {api_version} has"):
            try:
                self._custom.list_namespaced_custom_object(
                    group, version, self.namespace, PLURALS[kind], limit=1, _request_timeout=_TIMEOUT_S
                )
            except self._error as error:
                if error.status == _NOT_FOUND:
                    return False
                raise
        return True

    def pods(self, label: str) -> list[Manifest]:
        """Pods with this label, oldest first."""
        with self._said("list pods"):
            answer = self._core.list_namespaced_pod(
                self.namespace, label_selector=label, _preload_content=False, _request_timeout=_TIMEOUT_S
            )
            items: list[Manifest] = json.loads(answer.data)["items"]
        return sorted(items, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def node_labels(self, selector: str = "") -> dict[str, dict[str, str]]:
        """Labels of the cluster's nodes by name."""
        with self._said("list nodes"):
            answer = self._core.list_node(label_selector=selector, _preload_content=False, _request_timeout=_TIMEOUT_S)
            items: list[Manifest] = json.loads(answer.data)["items"]
        return {node["metadata"]["name"]: node["metadata"].get("labels", {}) for node in items}

    def log(self, pod: str, container: str, since_s: int | None = None) -> str:
        """What the pod has printed, in the last seconds where they are given, every line with its time; nothing before
        its container has started."""
        with self._said(f"read the log of pod {pod}"):
            try:
                answer = self._core.read_namespaced_pod_log(
                    pod,
                    self.namespace,
                    container=container,
                    since_seconds=since_s,
                    timestamps=True,
                    _preload_content=False,
                    _request_timeout=_TIMEOUT_S,
                )
            except self._error as error:
                if error.status in (400, _NOT_FOUND):  # not started, or gone
                    return ""
                raise
        return bytes(answer.data).decode(errors="replace")

    @contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """Errors of the server and of the connection, as one line."""
        from urllib3.exceptions import HTTPError

        try:
            yield
        except self._error as error:
            raise TargetFailed(f"Kubernetes did not {what} ({_reason(error)}); {_then(error.status)}") from None
        except (HTTPError, OSError) as error:
            raise TargetFailed(
                f"the API server of Kubernetes does not answer ({one_line(error, 200)}); try kubectl get nodes by hand"
            ) from None


def _client() -> tuple[Any, Any]:
    try:
        from kubernetes import client, config
    except ModuleNotFoundError:
        raise missing("kubernetes", "--on kubernetes", "kubernetes") from None
    return client, config


def _configure(config: Any) -> str:
    """The namespace of the context in use; a pod without a kubeconfig uses its service account."""
    try:
        config.load_kube_config()
    except config.ConfigException:
        config.load_incluster_config()
        return ""
    return str(config.list_kube_config_contexts()[1]["context"].get("namespace", ""))


def _group(manifest: Manifest) -> tuple[str, str]:
    group, version = manifest["apiVersion"].split("/")
    return group, version


def _reason(error: Any) -> str:
    try:
        return one_line(json.loads(error.body)["message"], 300)
    except (TypeError, ValueError, KeyError):
        return one_line(error.reason or error.status, 300)


def _then(status: int) -> str:
    if status in (401, 403):
        return "ask for a role that may create, read and delete it in this namespace"
    return "mend what it names in [launch] and start again"
