"""The objects of a job on Kubernetes, as plain dictionaries: pods of an Indexed Job that find each other by name.

Every node of the job is one pod, NAME-K, which runs torchrun for its ranks. The recipe is a ConfigMap; runs and data
are on the volumes of `launch.mounts`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

from armillary.cluster.job import CHECK, INTERRUPTED, RECIPE, Job
from armillary.cluster.node import USER_ERROR
from armillary.cluster.node_health import LIVE, READY
from armillary.errors import BadInput, BadRecipe
from armillary.machine.network_domain import DOMAINS_FILE
from armillary.machine.node_id import NODE_ID

Manifest = dict[str, Any]

LABEL = "armillary.job"
CONTAINER = "ranks"
JOBSET, TRAINER = "jobset.x-k8s.io/v1alpha2", "trainer.kubeflow.org/v1alpha1"
CONTROLLERS = {"job": ("batch/v1", "Job"), "jobset": (JOBSET, "JobSet"), "trainjob": (TRAINER, "TrainJob")}
"""launch.controller -> API version and kind of the object that owns the others"""
HEALTH_PORT = 8080
USER_ID = 1000
"""of the image in the Dockerfile"""
_JOB_FOLDER, _DOMAINS = "/etc/armillary", "domains.json"
_REPLICATED = "node"
"""name that Kubeflow expects of the pods in which ranks run"""
_MARGIN_S = 10
"""from the end of the ranks to the end of their pod"""
_RESOLVE_S = 600
"""how long a pod waits for the name of the first one: it may be scheduled later, on a node that pulls the image"""
_START_S, _SETUP_S = 120, 1800
"""how long a pod may take to answer its first probe, without and with launch.setup"""
_LONGEST_NAME = 52
"""of 63 characters, less the number of a pod and what JobSet puts between"""


def manifests(job: Job, recipe: str, domains: Mapping[str, str] | None = None) -> list[Manifest]:
    """The owner first (Job, JobSet or TrainJob), then what lives as long as it does. `domains` of the cluster's nodes
    travel with the recipe: which of them a pod gets is not known yet."""
    _check(job)
    if domains:
        places = {**job.launch.environment, DOMAINS_FILE: f"{_JOB_FOLDER}/{_DOMAINS}"}
        job = replace(job, launch=replace(job.launch, environment=places))
    owners = {"job": _indexed_job, "jobset": _jobset, "trainjob": _trainjob}[job.launch.controller](job)
    services = [_service(job)] if job.launch.controller == "job" else []
    budget = [_disruption_budget(job)] if job.num_nodes > 1 else []
    return [*owners, _config_map(job, recipe, domains or {}), *services, *budget]


def home_of(job: Job) -> PurePosixPath:
    """Folder for runs and data in the pods."""
    return PurePosixPath(job.launch.home or job.launch.mounts[0].partition(":")[2])


def _check(job: Job) -> None:
    launch = job.launch
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > _LONGEST_NAME:
        raise BadInput(
            f"'{job.name}' is no name on Kubernetes (a-z, 0-9 and -, at most {_LONGEST_NAME}); give another --run"
        )
    if not launch.image:
        raise BadRecipe("pods need a container image; try --set launch.image=REGISTRY/armillary:TAG")
    if not launch.mounts:
        raise BadRecipe("a run would be lost with its pods; name a shared volume: --set launch.mounts=CLAIM:/shared")


def _meta(job: Job, name: str = "") -> Manifest:
    return {"name": name or job.name, "labels": _labels(job)}


def _labels(job: Job) -> dict[str, str]:
    names = {"app.kubernetes.io/name": "armillary", "app.kubernetes.io/component": "training"}
    return {**names, "app.kubernetes.io/managed-by": "armillary-launch", LABEL: job.name}


# --- the objects


def _indexed_job(job: Job) -> list[Manifest]:
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(job), "spec": job_spec(job)}]


def job_spec(job: Job) -> Manifest:
    """Pods that fail are made again with the same number, and resume; a user's error ends the job, and pods that were
    evicted do not count, nor those that saved and ended with them. In a JobSet one that fails ends its Job: JobSet
    starts all of them again."""
    limit = {"activeDeadlineSeconds": ceil(job.launch.time_limit_s)} if job.launch.time_limit_s else {}
    evicted = {"type": "DisruptionTarget", "status": "True"}
    remade = job.launch.requeue and job.launch.controller != "jobset"
    ignored = [
        {"action": "Ignore", "onPodConditions": [evicted]},
        {"action": "Ignore", "onExitCodes": _exit_codes(INTERRUPTED)},
    ]
    return {
        "completionMode": "Indexed",
        "completions": job.num_nodes,
        "parallelism": job.num_nodes,
        "backoffLimit": (job.restarts + 1) * job.num_nodes if remade else 0,
        **limit,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": _exit_codes(USER_ERROR)},
                *(ignored if job.launch.requeue else []),
            ]
        },
        "template": pod_template(job),
    }


def _exit_codes(*codes: int) -> Manifest:
    return {"containerName": CONTAINER, "operator": "In", "values": list(codes)}


def _jobset(job: Job) -> list[Manifest]:
    """JobSet makes the service itself, and starts all pods again when it has to start one."""
    restarts = job.restarts + 1 if job.launch.requeue else 0
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": restarts},
        "replicatedJobs": [_replicated(job)],
    }
    return [{"apiVersion": JOBSET, "kind": "JobSet", "metadata": _meta(job), "spec": spec}]


def _replicated(job: Job) -> Manifest:
    return {"name": _REPLICATED, "replicas": 1, "template": {"spec": job_spec(job)}}


def _trainjob(job: Job) -> list[Manifest]:
    """A runtime of its own carries the pods as they are, so that no runtime of the cluster has to fit."""
    policy = {"numNodes": job.num_nodes, "torch": {"numProcPerNode": job.ranks_per_node}}
    template = {"spec": {"network": {"publishNotReadyAddresses": True}, "replicatedJobs": [_trainer_replicated(job)]}}
    labels = {**_labels(job), "trainer.kubeflow.org/framework": "torch"}
    runtime = {
        "apiVersion": TRAINER,
        "kind": "TrainingRuntime",
        "metadata": {"name": job.name, "labels": labels},
        "spec": {"mlPolicy": policy, "template": template},
    }
    reference = {"apiGroup": TRAINER.partition("/")[0], "kind": "TrainingRuntime", "name": job.name}
    spec = {"runtimeRef": reference, "trainer": {"numNodes": job.num_nodes}}
    return [{"apiVersion": TRAINER, "kind": "TrainJob", "metadata": _meta(job), "spec": spec}, runtime]


def _trainer_replicated(job: Job) -> Manifest:
    """The container that Kubeflow takes for the trainer's is called node, too."""
    replicated = _replicated(job)
    template = replicated["template"]
    template["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    template["spec"]["template"]["spec"]["containers"][0]["name"] = _REPLICATED
    for rule in template["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            rule["onExitCodes"]["containerName"] = _REPLICATED
    return replicated


def _config_map(job: Job, recipe: str, domains: Mapping[str, str]) -> Manifest:
    data = {RECIPE: recipe, **({_DOMAINS: json.dumps(dict(domains))} if domains else {})}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(job), "data": data}


def _service(job: Job) -> Manifest:
    """Headless: names of pods, also before they are ready, because they are ready only once they have met."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {LABEL: job.name},
        "ports": [{"name": "rendezvous", "port": job.port, "targetPort": job.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": spec}


def _disruption_budget(job: Job) -> Manifest:
    """One pod may be evicted at a time. Pods of a Job are not scaled, so only minAvailable is allowed."""
    spec = {"minAvailable": job.num_nodes - 1, "selector": {"matchLabels": {LABEL: job.name}}}
    return {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": _meta(job), "spec": spec}


# --- the pod of a node


def pod_template(job: Job) -> Manifest:
    profile = {"type": "RuntimeDefault"}
    secure = {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",  # else the owner of every checkpoint is set at every start
        "seccompProfile": profile,
    }
    spec = {
        "restartPolicy": "Never",
        "subdomain": job.name,
        "terminationGracePeriodSeconds": ceil(job.stop_s) + _MARGIN_S,
        "automountServiceAccountToken": False,
        "securityContext": secure,
        **_placement(job),
        "containers": [_container(job)],
        "volumes": _volumes(job),
    }
    if job.launch.controller != "job":
        del spec["subdomain"]  # JobSet sets it
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _placement(job: Job) -> Manifest:
    """Nodes of the job are spread over hosts, and packed into one domain of the network where they fit."""
    launch, selector = job.launch, {"matchLabels": {LABEL: job.name}}
    fields: Manifest = {
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule" if job.gpus_per_node else "ScheduleAnyway",
                "labelSelector": selector,
            }
        ]
    }
    if launch.node_selector:
        fields["nodeSelector"] = dict(launch.node_selector)
    if job.gpus_per_node:
        fields["tolerations"] = [{"key": launch.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    if launch.pack_within:
        term = {"topologyKey": launch.pack_within, "labelSelector": selector}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        fields["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    return fields


def _container(job: Job) -> Manifest:
    secrets = [{"secretRef": {"name": name}} for name in job.launch.secrets]
    env: list[Manifest] = [{"name": name, "value": value} for name, value in job.launch.environment.items()]
    env.append({"name": NODE_ID, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    return {
        "name": CONTAINER,
        "image": job.launch.image,
        "command": _command(job),
        "workingDir": str(home_of(job)),
        "env": env,
        **({"envFrom": secrets} if secrets else {}),
        "ports": [{"name": "rendezvous", "containerPort": job.port}, {"name": "health", "containerPort": HEALTH_PORT}],
        "resources": _resources(job),
        **_probes(job),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": _volume_mounts(job),
    }


def _command(job: Job) -> list[str]:
    """The node's start; after setup lines it takes the place of their shell, so that it gets the pod's signals."""
    if not job.launch.setup:
        return entry_point(job)
    return ["/bin/sh", "-c", " && ".join((*job.launch.setup, f"exec {shlex.join(entry_point(job))}"))]


def entry_point(job: Job) -> list[str]:
    """What a pod runs. A check's result is printed, because its file would be in the pod."""
    inside = replace(job, folder=Path(_JOB_FOLDER), work=Path(home_of(job)), home=Path(home_of(job)))
    words = shlex.split(inside.node_command(f"{first_pod(job)}:{job.port}"))
    result = str(inside.folder / CHECK)
    words = ["-" if word == result else word for word in words]
    split = words.index("--")
    return [*words[:split], "--health-port", str(HEALTH_PORT), "--resolve-s", str(_RESOLVE_S), *words[split:]]


def first_pod(job: Job) -> str:
    """The name under which the first pod is found; the service and the job have the same name."""
    stem = f"{job.name}-0" if job.launch.controller == "job" else f"{job.name}-{_REPLICATED}-0-0"
    return f"{stem}.{job.name}"


def _probes(job: Job) -> Manifest:
    """Live while the process that watches the ranks answers; ready while all ranks of the node run. A hang is noticed,
    judged and ended by the ranks themselves (train.on_hang). Setup lines, which may install something, come first."""
    start_s = _SETUP_S if job.launch.setup else _START_S

    def probe(path: str, period_s: int, failures: int) -> Manifest:
        get = {"path": path, "port": "health"}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "startupProbe": probe(LIVE, 5, start_s // 5),
        "livenessProbe": probe(LIVE, 20, 6),
        "readinessProbe": probe(READY, 10, 3),
    }


def _resources(job: Job) -> Manifest:
    launch = job.launch
    given = {
        "cpu": str(launch.cpus_per_node) if launch.cpus_per_node else None,
        "memory": str(launch.memory_bytes) if launch.memory_bytes else None,
    }
    requests = {name: value for name, value in given.items() if value}
    gpus = {launch.gpu_resource: job.gpus_per_node} if job.gpus_per_node else {}
    limits = {**({"memory": requests["memory"]} if "memory" in requests else {}), **gpus}
    return {name: table for name, table in (("requests", {**requests, **gpus}), ("limits", limits)) if table}


def _volumes(job: Job) -> list[Manifest]:
    """Shared memory for NCCL and loader workers (a container has 64 MB by default), the recipe, and launch.mounts."""
    size = {"sizeLimit": str(job.launch.shm_bytes)} if job.launch.shm_bytes else {}
    volumes: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", **size}},
        {"name": "job", "configMap": {"name": job.name}},
    ]
    for number, mount in enumerate(job.launch.mounts):
        source = mount.partition(":")[0]
        where = {"hostPath": {"path": source}} if "/" in source else {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": f"mount-{number}", **where})
    return volumes


def _volume_mounts(job: Job) -> list[Manifest]:
    mounts = [
        {"name": f"mount-{number}", "mountPath": mount.partition(":")[2]}
        for number, mount in enumerate(job.launch.mounts)
    ]
    fixed: list[Manifest] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "job", "mountPath": _JOB_FOLDER, "readOnly": True},
    ]
    return [*fixed, *mounts]
