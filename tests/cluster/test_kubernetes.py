"""Manifests against the schemas of three Kubernetes versions, and the target against an API server's HTTP interface.

The schemas and the official client are 230 MB, so these tests run with `make peers`; the others need neither.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from armillary.cluster.commands import TargetFailed
from armillary.cluster.job import RECIPE, Job, write_job
from armillary.cluster.kubernetes import kubernetes_jobs
from armillary.cluster.kubernetes.manifests import manifests, pod_template
from armillary.cluster.log_files import log_lines
from armillary.errors import ArmillaryError, BadInput, BadRecipe
from armillary.spec.tables.launch_target import Launch
from tests.cluster.fake_api_server import FakeApi, running_api

VERSIONS = ("1.29", "1.33", "1.37")
DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
GIVEN: dict[str, Any] = {
    "image": "registry.example/armillary:1",
    "mounts": ("home:/shared", "/nvme:/scratch"),
    "namespace": "ml",
    "port": 29_500,
}


def a_job(folder: Path = Path("/here/jobs/fox"), **launch: object) -> Job:
    return Job(
        name="fox",
        target="kubernetes",
        folder=folder,
        work=Path("/here"),
        num_nodes=2,
        ranks_per_node=8,
        gpus_per_node=8,
        restarts=3,
        python="python3",
        launch=Launch(**{**GIVEN, **launch}),  # type: ignore[arg-type]
    )


def validate(manifest: dict[str, Any]) -> None:
    import kubernetes_validate

    for version in VERSIONS:
        kubernetes_validate.validate(manifest, version, strict=True)


FULL = {
    "secrets": ("hf-token",),
    "node_selector": {"gpu": "h200"},
    "pack_within": "rack",
    "shm_bytes": 2**34,
    "cpus_per_node": 16,
    "memory_bytes": 2**38,
    "time_limit_s": 86_400.0,
    "environment": {"NCCL_DEBUG": "INFO"},
    "setup": ("ulimit -l unlimited",),
    "requeue": False,
}


@pytest.mark.peers
@pytest.mark.parametrize("more", [{}, FULL])
def test_every_manifest_is_valid(more: dict[str, object]) -> None:
    text = kubernetes_jobs.files(a_job(**more), 'a = "1"\nb = 2\n')[kubernetes_jobs.FILE]
    objects = list(yaml.safe_load_all(text))
    assert [each["kind"] for each in objects] == ["Job", "ConfigMap", "Service", "PodDisruptionBudget"]
    assert objects[1]["data"][RECIPE] == 'a = "1"\nb = 2\n'
    for each in objects:
        validate(each)
    import kubernetes_validate

    broken = {**objects[0], "spec": {**objects[0]["spec"], "parallelism": "two"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


@pytest.mark.peers
@pytest.mark.parametrize("requeue", [False, True])
@pytest.mark.parametrize(
    ("controller", "kinds"), [("jobset", ["JobSet"]), ("trainjob", ["TrainJob", "TrainingRuntime"])]
)
def test_the_job_inside_a_jobset_is_valid(controller: str, kinds: list[str], requeue: bool) -> None:
    objects = manifests(a_job(**{**FULL, "controller": controller, "requeue": requeue}), "")
    assert [each["kind"] for each in objects] == [*kinds, "ConfigMap", "PodDisruptionBudget"]
    holder = objects[len(kinds) - 1]["spec"]
    (replicated,) = (holder if controller == "jobset" else holder["template"]["spec"])["replicatedJobs"]
    meta = {"metadata": {"name": "fox"}}
    validate({"apiVersion": "batch/v1", "kind": "Job", **meta, "spec": replicated["template"]["spec"]})
    assert "fox-node-0-0.fox:29500" in json.dumps(replicated)
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    rules = replicated["template"]["spec"]["podFailurePolicy"]["rules"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {container["name"]}


def test_what_a_pod_asks_for() -> None:
    (job, *_) = manifests(a_job(**FULL), "")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": str(2**38), "nvidia.com/gpu": 8}
    assert pod["terminationGracePeriodSeconds"] == 130, "launch.signal_s is 120"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(2**34)}} in pod["volumes"]
    assert {"name": "mount-0", "persistentVolumeClaim": {"claimName": "home"}} in pod["volumes"]
    assert {"name": "mount-1", "hostPath": {"path": "/nvme"}} in pod["volumes"]
    assert container["command"][:2] == ["/bin/sh", "-c"]
    assert container["command"][2].startswith("ulimit -l unlimited && exec python3 -m armillary.cluster.node --nodes 2")
    slow = replace(a_job(), grace_s=300.0)
    assert manifests(slow, "")[0]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 310


def test_a_check_prints_its_result() -> None:
    (job, *_) = manifests(replace(a_job(), is_check=True), "")
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[words.index("--") + 1 :] == [
        "launch",
        "measure",
        "/etc/armillary/recipe.toml",
        "-",
        "--home",
        "/shared",
    ]


@pytest.mark.parametrize(
    ("job", "error"),
    [
        (replace(a_job(), name="Fox_1"), BadInput),
        (a_job(image=""), BadRecipe),
        (a_job(mounts=()), BadRecipe),
    ],
)
def test_what_cannot_run_is_refused(job: Job, error: type[ArmillaryError]) -> None:
    with pytest.raises(error, match=r"--run|--set launch"):
        manifests(job, "")


@pytest.mark.peers
@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.yaml")), ids=lambda file: file.parent.name + "/" + file.name)
def test_the_kustomize_base(file: Path) -> None:
    for each in yaml.safe_load_all(file.read_text()):
        if each["kind"] == "Kustomization":
            for name in each["resources"]:
                assert (file.parent / name).exists(), f"{file} names {name}"
        else:
            validate(each)


# --- the target, through the official client


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with running_api() as (api, address):
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": address}}],
            "users": [{"name": "me", "user": {"token": "secret"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "ml"}}],
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        yield api


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = a_job(tmp_path / "jobs" / "fox", namespace="")
    write_job(job, {RECIPE: "", **kubernetes_jobs.files(job, "")})
    return job


def a_pod(name: str, index: int, phase: str = "Running") -> dict[str, Any]:
    meta = {"name": name, "labels": {"armillary.job": "fox"}, "annotations": {kubernetes_jobs.INDEX: str(index)}}
    spec = {"nodeName": f"gpu{index}", "containers": [{"name": "ranks"}]}
    return {
        "metadata": {**meta, "creationTimestamp": f"2026-01-01T00:00:0{index}Z"},
        "spec": spec,
        "status": {"phase": phase},
    }


@pytest.mark.peers
def test_submit_makes_what_the_job_owns(api: FakeApi, job: Job) -> None:
    assert kubernetes_jobs.submit(job) == "fox"
    assert api.asked == [
        "GET /api/v1/nodes",
        "POST /apis/batch/v1/namespaces/ml/jobs",
        "POST /api/v1/namespaces/ml/configmaps",
        "POST /api/v1/namespaces/ml/services",
        "POST /apis/policy/v1/namespaces/ml/poddisruptionbudgets",
    ]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "fox", "uid": "uid-1"}
    assert all(body["metadata"]["ownerReferences"] == [owner] for body in api.bodies[1:])
    assert kubernetes_jobs.state(job).state == "pending"
    with pytest.raises(TargetFailed, match=r"Job fox runs in this namespace; cancel it where .* another --run"):
        kubernetes_jobs.submit(job)  # as from another folder
    assert len(api.bodies) == 4 and not any(asked.startswith("DELETE") for asked in api.asked)
    owner_now = api.objects["/apis/batch/v1/namespaces/ml/jobs/fox"]
    owner_now["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    kubernetes_jobs.submit(job)  # one that has ended is replaced
    assert len(api.bodies) == 8 and "DELETE /apis/batch/v1/namespaces/ml/jobs/fox" in api.asked


@pytest.mark.peers
def test_pods_learn_the_domains_of_the_nodes(api: FakeApi, job: Job) -> None:
    zone, clique = "topology.kubernetes.io/zone", "nvidia.com/gpu.clique"
    api.nodes = {f"gpu{number}": {zone: "a", clique: f"c{number // 2}"} for number in range(4)}
    assert kubernetes_jobs.domains(job.launch)["gpu3"] == ("zone=a", "nvlink=c1")
    kubernetes_jobs.submit(job)
    owner, recipe = api.bodies[:2]
    assert json.loads(recipe["data"]["domains.json"])["gpu2"] == "zone=a/nvlink=c1"
    (container,) = owner["spec"]["template"]["spec"]["containers"]
    assert {"name": "ARMILLARY_NETWORK_DOMAINS", "value": "/etc/armillary/domains.json"} in container["env"]
    api.refused.add("nodes")
    assert kubernetes_jobs.domains(job.launch) == {}, "a role that may not list nodes"


@pytest.mark.peers
def test_a_job_that_cannot_be_made_whole_is_taken_back(api: FakeApi, job: Job) -> None:
    """Its pods would wait for a recipe that never comes."""
    api.refused.add("configmaps")
    with pytest.raises(TargetFailed, match="did not create ConfigMap"):
        kubernetes_jobs.submit(job)
    assert not api.objects


@pytest.mark.peers
def test_the_names_of_pods_stay_until_they_have_saved(api: FakeApi, job: Job) -> None:
    kubernetes_jobs.submit(job)
    api.pods.append(a_pod("fox-0-abc", 0))
    kubernetes_jobs.cancel(job)
    assert "/api/v1/namespaces/ml/services/fox" in api.objects
    api.all_gone()
    assert not api.objects


def test_setup_lines_have_time_before_the_first_probe() -> None:
    def start_s(job: Job) -> int:
        (container,) = pod_template(job)["spec"]["containers"]
        probe = container["startupProbe"]
        return int(probe["periodSeconds"] * probe["failureThreshold"])

    assert start_s(a_job()) == 120 and start_s(a_job(setup=("pip install wheel",))) == 1800


@pytest.mark.peers
def test_state_logs_and_cancel(api: FakeApi, job: Job) -> None:
    kubernetes_jobs.submit(job)
    api.pods += [a_pod("fox-0-abc", 0), a_pod("fox-1-def", 1)]
    api.logs |= {"fox-0-abc": "2026-01-01T00:00:01.12Z step 1\n", "fox-1-def": "2026-01-01T00:00:01.1Z hello\n"}
    seen = kubernetes_jobs.state(job)
    assert (seen.state, seen.where) == ("running", "gpu0, gpu1")
    kubernetes_jobs.fetch_logs(job)
    api.logs["fox-0-abc"] += "2026-01-01T00:00:01.123Z step 2\n"
    kubernetes_jobs.fetch_logs(job)
    assert list(log_lines(job)) == ["node 0 | step 1", "node 0 | step 2", "node 1 | hello"]
    kubernetes_jobs.cancel(job)
    assert kubernetes_jobs.state(job).detail == "ending"
    api.all_gone()
    assert kubernetes_jobs.state(job).state == "cancelled" and not api.objects


@pytest.mark.peers
def test_a_pod_whose_log_cannot_be_read_stops_neither_logs_nor_cancel(api: FakeApi, job: Job) -> None:
    kubernetes_jobs.submit(job)
    api.pods += [a_pod("fox-0-abc", 0), a_pod("fox-1-def", 1)]
    api.logs |= {"fox-1-def": "2026-01-01T00:00:01.1Z hello\n"}
    api.refused.add("fox-0-abc/log")
    for _ in range(2):  # said once
        kubernetes_jobs.fetch_logs(job)
    said, hello = log_lines(job)
    assert "did not read the log of pod fox-0-abc" in said and hello == "node 1 | hello"
    api.refused.add("fox-1-def/log")
    with pytest.raises(TargetFailed, match="the log of pod fox-0-abc"):
        kubernetes_jobs.fetch_logs(job)
    kubernetes_jobs.cancel(job)
    assert kubernetes_jobs.state(job).detail == "ending"
    api.refused.clear()
    kubernetes_jobs.fetch_logs(job)
    assert list(log_lines(job)) == ["hello"]


@pytest.mark.peers
def test_a_progress_bar_does_not_end_the_log(api: FakeApi, job: Job) -> None:
    kubernetes_jobs.submit(job)
    api.pods += [a_pod("fox-0-abc", 0)]
    bar = "10 %\r90 %\x0c\u2028 done"
    api.logs["fox-0-abc"] = f"2026-01-01T00:00:01.1Z {bar}\n2026-01-01T00:00:02Z step"
    kubernetes_jobs.fetch_logs(job)
    api.logs["fox-0-abc"] += " 1\n2026-01-01T00:00:03Z step 2\n"
    kubernetes_jobs.fetch_logs(job)
    assert (job.logs / "node-0.log").read_bytes().decode() == f"{bar}\nstep 1\nstep 2\n"


def test_the_lines_of_a_log_and_their_times() -> None:
    text = "2026-01-01T00:00:01Z a\nb\n2026-01-01T00:00:01.5Z \n2026-01-01T00:00:02.25Z c"
    first = [("2026-01-01T00:00:01.000000000", "a"), ("2026-01-01T00:00:01.000000000", "b")]
    first.append(("2026-01-01T00:00:01.500000000", ""))
    assert kubernetes_jobs.timed_lines(text, is_over=False) == first
    assert kubernetes_jobs.timed_lines(text, is_over=True) == [*first, ("2026-01-01T00:00:02.250000000", "c")]


def test_pods_that_saved_because_another_was_drained_do_not_count() -> None:
    spec = manifests(a_job(), "")[0]["spec"]
    codes = {"containerName": "ranks", "operator": "In", "values": [75]}
    assert {"action": "Ignore", "onExitCodes": codes} in spec["podFailurePolicy"]["rules"]
    assert spec["backoffLimit"] == 8, "of pods that failed: 4 starts of 2"
    (jobset, *_) = manifests(a_job(controller="jobset"), "")
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"] == {"maxRestarts": 4}
    once = manifests(a_job(requeue=False), "")[0]["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in once] == ["FailJob"]


@pytest.mark.peers
def test_how_a_job_ended(api: FakeApi, job: Job) -> None:
    kubernetes_jobs.submit(job)
    owner = api.objects["/apis/batch/v1/namespaces/ml/jobs/fox"]
    owner["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]}
    assert kubernetes_jobs.state(job).state == "failed" and kubernetes_jobs.state(job).detail == "PodFailurePolicy"
    owner["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert kubernetes_jobs.state(job).state == "finished"


@pytest.mark.peers
def test_a_cluster_without_jobsets_says_so(api: FakeApi, job: Job) -> None:
    wanted = replace(job, launch=replace(job.launch, controller="jobset"))
    with pytest.raises(BadRecipe, match=r"launch\.controller=job"):
        kubernetes_jobs.submit(wanted)
    api.groups.append("/apis/jobset.x-k8s.io/v1alpha2")
    assert kubernetes_jobs.submit(wanted) == "fox" and api.bodies[0]["kind"] == "JobSet"


@pytest.mark.peers
def test_errors_of_the_server_are_one_line(api: FakeApi, job: Job) -> None:
    api.groups.clear()
    with pytest.raises(ArmillaryError, match="did not create Job fox"):
        kubernetes_jobs.submit(job)
