"""A pool of pods: every replica is a Deployment of one pod, which Kubernetes restarts, also on another node.

One Deployment of n pods could not be told which of them to drain: where it shrinks, pods that are pending or not ready
go first, whatever controller.kubernetes.io/pod-deletion-cost says. The objects are the only record, so that the pool of
another process adopts what runs. The gateway asks pods by their own address: it runs in the cluster, or where the
cluster's network is routed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from armillary.cluster.commands import TargetFailed
from armillary.cluster.kubernetes.api import Cluster
from armillary.cluster.kubernetes.manifests import Manifest
from armillary.spec.replica_pool import Member, State

REPLICA, RELEASE = "armillary.replica", "armillary/release"
"""label of a Deployment and its pod with the replica's name; annotation with its release"""
_POLL_S = 0.5


class KubernetesPool:
    """Replicas as Deployments."""

    def __init__(self, cluster: Cluster, config: Manifest, deployment: Manifest) -> None:
        """`config`: the ConfigMap that pods read; `deployment`: of which each replica is a copy, whose container's
        second argument is what it serves."""
        self._cluster, self._deployment = cluster, deployment
        labels = deployment["metadata"]["labels"]
        self._label = f"app.kubernetes.io/instance={labels['app.kubernetes.io/instance']},{REPLICA}"
        self._ready: dict[str, tuple[str, float]] = {}  # replica -> uid of its pod, and when that was first ready
        cluster.replace_config(config)

    def members(self) -> Sequence[Member]:
        deployments = self._cluster.listed("apps/v1", "Deployment", self._label)
        pods: dict[str, list[Manifest]] = {}
        for pod in self._cluster.pods(self._label):
            pods.setdefault(pod["metadata"]["labels"][REPLICA], []).append(pod)
        names = {_name(deployment) for deployment in deployments}
        for gone in self._ready.keys() - names:
            del self._ready[gone]
        return [self._member(deployment, pods.get(_name(deployment), [])) for deployment in _by_age(deployments)]

    def start(self, release: str = "") -> Member:
        taken = {_name(each) for each in self._cluster.listed("apps/v1", "Deployment", self._label)}
        base, number = self._deployment["metadata"]["name"], int(time.time())
        while f"{base}-{number}" in taken:  # a name that was used before would mix two logs
            number += 1
        created = self._cluster.create(self._replica(f"{base}-{number}", release))
        if created is None:
            raise TargetFailed(f"a Deployment {base}-{number} is there already; kubectl delete deployment removes it")
        return self._member(created, [])

    def stop(self, name: str) -> None:
        """Delete its Deployment; its pod gets SIGTERM and has its grace period."""
        self._cluster.delete(_key(name))

    def kill(self, name: str) -> None:
        self._cluster.delete(_key(name))
        for pod in self._cluster.pods(f"{REPLICA}={name}"):
            self._cluster.kill_pod(pod["metadata"]["name"])

    def stop_all(self, grace_s: float) -> None:
        for member in self.members():
            self.stop(member.name)
        end = time.monotonic() + grace_s
        while (left := self.members()) and time.monotonic() < end:
            time.sleep(_POLL_S)
        for member in left:
            self.kill(member.name)

    def log(self, name: str) -> str:
        return f"kubectl logs --namespace {self._cluster.namespace} --selector {REPLICA}={name}"

    # --- objects

    def _replica(self, name: str, release: str) -> Manifest:
        """The Deployment of one replica."""
        replica = copy.deepcopy(self._deployment)
        template = replica["spec"]["template"]
        replica["metadata"]["name"] = name
        for labels in (
            replica["metadata"]["labels"],
            replica["spec"]["selector"]["matchLabels"],
            template["metadata"]["labels"],
        ):
            labels[REPLICA] = name
        replica["metadata"]["annotations"] = {RELEASE: release}
        if release:
            template["spec"]["containers"][0]["args"][1] = release
        return replica

    def _member(self, deployment: Manifest, pods: list[Manifest]) -> Member:
        meta, name = deployment["metadata"], _name(deployment)
        pod = next((each for each in reversed(pods) if "deletionTimestamp" not in each["metadata"]), None)
        ready = self._ready_since(name, pod)
        state: State = "stopping" if "deletionTimestamp" in meta else "starting" if ready is None else "ready"
        address = pod.get("status", {}).get("podIP", "") if pod is not None else ""
        port = deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"]
        return Member(
            name=name,
            url=f"http://{address}:{port}" if address else "",
            state=state,
            began=_seconds(meta.get("creationTimestamp")),
            ready=ready,
            release=meta.get("annotations", {}).get(RELEASE, ""),
        )

    def _ready_since(self, name: str, pod: Manifest | None) -> float | None:
        """When the pod was first ready: one that is not for a moment stays with the gateway, whose own checks count."""
        if pod is None:
            return None
        uid, known = pod["metadata"]["uid"], self._ready.get(name)
        if known is not None and known[0] == uid:
            return known[1]
        conditions = pod.get("status", {}).get("conditions", [])
        since = next((each for each in conditions if each["type"] == "Ready" and each["status"] == "True"), None)
        if since is None:
            return None
        self._ready[name] = (uid, _seconds(since.get("lastTransitionTime")))
        return self._ready[name][1]


def _key(name: str) -> Manifest:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}}


def _name(deployment: Manifest) -> str:
    return str(deployment["metadata"]["name"])


def _by_age(deployments: list[Manifest]) -> list[Manifest]:
    return sorted(deployments, key=lambda each: (each["metadata"].get("creationTimestamp", ""), _name(each)))


def _seconds(stamp: str | None) -> float:
    """Kubernetes' time, like 2026-01-01T00:00:00Z, in seconds since 1970."""
    with suppress(ValueError, TypeError):
        return datetime.fromisoformat(str(stamp)).timestamp()
    return time.time()
