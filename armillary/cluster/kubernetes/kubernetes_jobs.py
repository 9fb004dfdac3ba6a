"""Kubernetes as a target of `armillary launch`: submit, state, logs and cancel of a job."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
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

FILE, UNREAD = "kubernetes.yaml", "kubernetes.log"
INDEX = "batch.kubernetes.io/job-completion-index"
_CANCELLED = "cancelled"
_GONE_S = 60.0
"""how long a new start waits, beyond the grace period, for the objects of the one before"""
_OVERLAP_S = 60
"""seconds of a log that are read once more, in case a line came late"""
_TIMED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|\+00:00) ?(.*)", re.DOTALL)
"""a line with its time in front"""
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
    owner, *rest = _written(job)
    created = cluster.create(owner) or _replace_ended(cluster, owner, job)
    (job.folder / _CANCELLED).unlink(missing_ok=True)
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


def _replace_ended(cluster: Cluster, owner: Manifest, job: Job) -> Manifest:
    """As `_replace`; one of this name that still runs was started from another folder, or by another user."""
    before = cluster.read(owner)
    if before and not before["metadata"].get("deletionTimestamp") and read_state(before, []).is_live:
        what = f"{owner['kind']} {job.name}"
        raise TargetFailed(f"{what} runs in this namespace; cancel it where it was started, or name another --run")
    return _replace(cluster, owner, job)


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
    """Append what the pods have printed since the last time to logs/node-K.log; pods whose log cannot be read are named
    in logs/kubernetes.log, and the others read."""
    cluster = _cluster(job)
    pods, failed = cluster.pods(f"{LABEL}={job.name}"), []
    for pod in pods:
        try:
            _fetch_log(cluster, job, pod)
        except ArmillaryError as error:
            failed.append(error)
    if failed and len(failed) == len(pods):
        raise failed[0]
    _note_unread(job.logs / UNREAD, [str(error) for error in failed])


def _note_unread(path: Path, errors: list[str]) -> None:
    """Each error once, however often logs are fetched, and none once all can be read."""
    if not errors:
        return path.unlink(missing_ok=True)
    known = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    with path.open("a", encoding="utf-8") as file:
        file.writelines(f"{error}\n" for error in errors if error not in known)


def _fetch_log(cluster: Cluster, job: Job, pod: Manifest) -> None:
    name, index = pod["metadata"]["name"], pod["metadata"].get("annotations", {}).get(INDEX, "0")
    seen = job.logs / f"{name}.seen"  # time of the newest line
    last = seen.read_text() if seen.exists() else ""
    since_s = int(time.time() - seen.stat().st_mtime) + _OVERLAP_S if last else None
    text = cluster.log(name, pod["spec"]["containers"][0]["name"], since_s)
    is_over = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    new = [(moment, line) for moment, line in timed_lines(text, is_over=is_over) if moment > last]
    if new:
        with (job.logs / f"node-{index}.log").open("a", encoding="utf-8", newline="") as file:
            file.writelines(f"{line}\n" for _, line in new)
        seen.write_text(new[-1][0])


def timed_lines(text: str, *, is_over: bool) -> list[tuple[str, str]]:
    """(time, line) of a pod's log. Only a line feed ends a line: progress bars have carriage returns inside theirs. The
    last line is left for the next time while it may go on; one without a time belongs to the line before."""
    lines, timed = text.split("\n"), []
    rest, last = lines.pop(), ""
    for line in [*lines, rest] if rest and is_over else lines:
        if time_and_line := _TIMED.fullmatch(line):
            second, fraction, line = time_and_line.groups(default="")
            last = f"{second}.{fraction:0<9}"  # all nine digits: the kubelet leaves zeros at the end out
        timed.append((last, line))
    return timed


def cancel(job: Job) -> None:
    """Pods get SIGTERM and have their grace period to save; what the job owns, as the service by which they find each
    other, is deleted by the cluster once they have ended."""
    cluster = _cluster(job)
    with suppress(ArmillaryError):  # what cannot be read must not keep the job alive
        fetch_logs(job)
    (job.folder / _CANCELLED).touch()
    version, kind = CONTROLLERS[job.launch.controller]
    cluster.delete({"apiVersion": version, "kind": kind, "metadata": {"name": job.name}})


def _cluster(job: Job) -> Cluster:
    from armillary.cluster.kubernetes.api import Cluster

    return Cluster(job.launch.namespace)
