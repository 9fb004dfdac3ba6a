"""Kubernetes as a target of `armillary launch`: submit, state, logs and cancel of a job."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from armillary.cluster.commands import TargetFailed
from armillary.cluster.job import RECIPE, Job, JobState
from armillary.cluster.kubernetes.manifests import CONTROLLERS, LABEL, Manifest, manifests
from armillary.cluster.node_labels import KUBERNETES, domain_of
from armillary.errors import ArmillaryError, BadRecipe
from armillary.spec.network_domains import Domain
from armillary.spec.tables.launch_target import Launch

if TYPE_CHECKING:
    from armillary.cluster.kubernetes.api import Cluster

FILE = "kubernetes.yaml"
INDEX = "batch.kubernetes.io/job-completion-index"
_CANCELLED = "cancelled"
_GONE_S = 60.0
"""how long a new start waits, beyond the grace period, for the objects of the one before"""
_OVERLAP_S = 60
"""seconds of a log that are read once more, in case a line came late"""
_ENDED = {"Complete": "finished", "Completed": "finished", "Failed": "failed"}
"""conditions of Jobs, JobSets and TrainJobs that are over"""


def files(job: Job, recipe: str) -> dict[str, str]:
    return {FILE: to_yaml(manifests(job, recipe))}


def to_yaml(documents: list[Manifest]) -> str:
    import yaml

    return str(yaml.dump_all(documents, Dumper=_literal_dumper(), sort_keys=False, width=1000, explicit_start=True))


def _literal_dumper() -> Any:
    """YAML in which texts of several lines, like the recipe, stay readable, and nothing is a reference."""
    import yaml

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    dumper = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    dumper.add_representer(str, text)  # type: ignore[attr-defined]
    return dumper


def submit(job: Job) -> str:
    """Create the owner, and then what belongs to it: deleted with it, by the cluster."""
    cluster = _cluster(job)
    version, kind = CONTROLLERS[job.launch.controller]
    if job.launch.controller != "job" and not cluster.serves(version, kind):
        raise BadRecipe(f"this cluster has no {kind} ({version}); try --set launch.controller=job")
    (job.folder / _CANCELLED).unlink(missing_ok=True)
    owner, *rest = _written(job)
    created = cluster.create(owner) or _replace(cluster, owner, job)
    belongs = [{"apiVersion": version, "kind": kind, "name": job.name, "uid": created["metadata"]["uid"]}]
    try:
        for each in rest:
            owned = {**each, "metadata": {**each["metadata"], "ownerReferences": belongs}}
            if cluster.create(owned) is None:
                _replace(cluster, owned, job)
    except BaseException:  # its pods would wait for ever for what is missing
        with suppress(TargetFailed):
            cluster.delete(owner)
        raise
    return job.name


def _written(job: Job) -> list[Manifest]:
    domains = {node: "/".join(domain) for node, domain in domains_of(_cluster(job), job.launch).items() if domain}
    return manifests(job, (job.folder / RECIPE).read_text(encoding="utf-8"), domains)


def domains(launch: Launch) -> dict[str, Domain]:
    from armillary.cluster.kubernetes.api import Cluster

    try:
        return domains_of(Cluster(launch.namespace), launch)
    except ArmillaryError:  # no cluster is configured: submitting says so
        return {}


def domains_of(cluster: Cluster, launch: Launch) -> dict[str, Domain]:
    """From the labels of the nodes that pods may run on; nothing where the user's role may not list nodes."""
    selector = ",".join(f"{label}={value}" for label, value in launch.node_selector.items())
    try:
        labels = cluster.node_labels(selector)
    except TargetFailed:
        return {}
    return {node: domain_of(each, KUBERNETES, launch.pack_within) for node, each in labels.items()}


def _replace(cluster: Cluster, manifest: Manifest, job: Job) -> Manifest:
    """What an earlier start left of this name is deleted first, with its pods."""
    cluster.delete(manifest)
    end = time.monotonic() + job.stop_s + _GONE_S
    while (created := cluster.create(manifest)) is None:
        if time.monotonic() > end:
            what = f"{manifest['kind']} {job.name}"
            raise TargetFailed(f"{what} of an earlier start does not go away; kubectl delete it, or name another --run")
        time.sleep(1.0)
    return created


def state(job: Job) -> JobState:
    cluster = _cluster(job)
    version, kind = CONTROLLERS[job.launch.controller]
    owner = cluster.read({"apiVersion": version, "kind": kind, "metadata": {"name": job.name}})
    if owner is None:
        is_cancelled = (job.folder / _CANCELLED).exists()
        return JobState(state="cancelled") if is_cancelled else JobState(state="unknown", detail="the cluster has none")
    return read_state(owner, cluster.pods(f"{LABEL}={job.name}"))


def read_state(owner: Manifest, pods: list[Manifest]) -> JobState:
    """From the conditions of the owner; while it is not over, from its pods."""
    where = ", ".join(dict.fromkeys(name for pod in pods if (name := pod["spec"].get("nodeName"))))
    if owner["metadata"].get("deletionTimestamp"):
        return JobState(state="running", detail="ending", where=where)
    for condition in owner.get("status", {}).get("conditions", []):
        over = _ENDED.get(condition["type"])
        if over and condition["status"] == "True":
            why = ", ".join(filter(None, (condition.get("reason"), condition.get("message"))))
            return JobState(state="failed", detail=why) if over == "failed" else JobState(state="finished")
    if any(pod.get("status", {}).get("phase") == "Running" for pod in pods):
        return JobState(state="running", where=where)
    return JobState(state="pending", detail=_waits_for(pods), where=where)


def _waits_for(pods: list[Manifest]) -> str:
    """Why the first pod that waits does: no room, an image that cannot be pulled, a volume."""
    for pod in pods:
        status = pod.get("status", {})
        for container in status.get("containerStatuses", []):
            if waiting := container.get("state", {}).get("waiting"):
                return str(waiting.get("reason", ""))
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("message") or condition.get("reason", ""))
    return ""


def fetch_logs(job: Job) -> None:
    """Append what the pods have printed since the last time to logs/node-K.log."""
    cluster = _cluster(job)
    for pod in cluster.pods(f"{LABEL}={job.name}"):
        name, index = pod["metadata"]["name"], pod["metadata"].get("annotations", {}).get(INDEX, "0")
        seen = job.logs / f"{name}.seen"  # time of the newest line
        last = seen.read_text() if seen.exists() else ""
        since_s = int(time.time() - seen.stat().st_mtime) + _OVERLAP_S if last else None
        lines = cluster.log(name, pod["spec"]["containers"][0]["name"], since_s).splitlines()
        new = [line for line in lines if _moment(line) > last]
        if new:
            with (job.logs / f"node-{index}.log").open("a", encoding="utf-8") as file:
                file.writelines(f"{line.partition(' ')[2]}\n" for line in new)
            seen.write_text(_moment(new[-1]))


def _moment(line: str) -> str:
    """The time in front of a line, with all nine digits: the kubelet leaves zeros at the end out."""
    second, _, fraction = line.partition(" ")[0].rstrip("Z").partition(".")
    return f"{second}.{fraction:0<9}"


def cancel(job: Job) -> None:
    """Pods get SIGTERM and have their grace period to save; what the job owns, as the service by which they find each
    other, is deleted by the cluster once they have ended."""
    cluster = _cluster(job)
    fetch_logs(job)
    (job.folder / _CANCELLED).touch()
    version, kind = CONTROLLERS[job.launch.controller]
    cluster.delete({"apiVersion": version, "kind": kind, "metadata": {"name": job.name}})


def _cluster(job: Job) -> Cluster:
    from armillary.cluster.kubernetes.api import Cluster

    return Cluster(job.launch.namespace)
