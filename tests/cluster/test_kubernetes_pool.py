"""A pool of pods through the official client, against an API server with a Deployment controller on loopback."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from armillary.cluster.commands import TargetFailed
from armillary.cluster.kubernetes.service_manifests import pool_manifests
from tests.cluster.fake_api_server import running_api
from tests.cluster.fake_deployments import FakeDeployments
from tests.cluster.test_service_manifests import a_service
from tests.fleet.pool.test_local_pool import SERVER

pytestmark = pytest.mark.peers


def start(address: str, port: int, args: list[str]) -> list[str]:
    return [sys.executable, str(SERVER), str(port), "0.01", "4", address]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDeployments]:
    api = FakeDeployments(start)
    with running_api(api) as (_, url):
        cluster = {"name": "here", "cluster": {"server": url}}
        context = {"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "ml"}}
        file = tmp_path / "kubeconfig"
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context]}
        file.write_text(yaml.safe_dump(config | {"users": [{"name": "me", "user": {}}], "current-context": "here"}))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield api
        api.close()


def new_pool() -> Any:
    from armillary.cluster.kubernetes.api import Cluster
    from armillary.cluster.kubernetes.kubernetes_pool import KubernetesPool

    return KubernetesPool(Cluster(), *pool_manifests(a_service()))


def wait(check: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def states(pool: Any) -> list[str]:
    return [member.state for member in pool.members()]


def test_a_pod_starts_drains_and_ends(api: FakeDeployments) -> None:
    pool = new_pool()
    started = pool.start()
    assert started.state == "starting" and states(pool) == ["starting"]
    wait(lambda: states(pool) == ["ready"])
    (member,) = pool.members()
    assert member.name == started.name and member.url == "http://127.0.0.2:8000" and member.start_s is not None
    assert started.name in pool.log(started.name)
    pool.stop(started.name)
    pool.stop(started.name)  # as the controller does, until it is gone
    assert states(pool) in (["stopping"], [])
    wait(lambda: not pool.members())
    assert "/api/v1/namespaces/ml/configmaps/bot-config" in api.objects


def test_its_deployments_are_valid(api: FakeDeployments) -> None:
    from tests.cluster.test_kubernetes import validate

    validate(new_pool()._replica("bot-replica-1", "registry:bot:2"))


def test_another_release_and_another_pool(api: FakeDeployments) -> None:
    """A release is the server's argument; a new pool adopts what runs, and begins no name twice."""
    names = [new_pool().start(release).name for release in ("", "registry:bot:2")]
    wait(lambda: states(new_pool()) == ["ready", "ready"])
    adopting = new_pool()
    releases = {member.name: member.release for member in adopting.members()}
    assert releases == {names[0]: "", names[1]: "registry:bot:2"}
    paths = [f"/apis/apps/v1/namespaces/ml/deployments/{name}" for name in names]
    args = [api.objects[path]["spec"]["template"]["spec"]["containers"][0]["args"][1] for path in paths]
    assert args == ["/models/bot", "registry:bot:2"]
    adopting.stop_all(10.0)
    assert not adopting.members()


def test_a_pod_that_ends_is_replaced_at_another_address(api: FakeDeployments) -> None:
    pool = new_pool()
    pool.start()
    wait(lambda: states(pool) == ["ready"])
    before = pool.members()[0].url
    next(iter(api.processes.values())).kill()
    wait(lambda: states(pool) == ["ready"] and pool.members()[0].url != before)
    assert len(pool.members()) == 1
    pool.kill(pool.members()[0].name)
    wait(lambda: not pool.members())


def test_what_may_not_be_done_is_one_line(api: FakeDeployments) -> None:
    pool = new_pool()
    api.refused.add("deployments")
    api.answer = lambda *given: (403, {"kind": "Status", "message": "deployments is forbidden", "code": 403})  # type: ignore[method-assign]
    with pytest.raises(TargetFailed, match="forbidden"):
        pool.members()


def test_a_service_on_pods(api: FakeDeployments, tmp_path: Path) -> None:
    """The controller and the gateway over the pool: a pod that dies is replaced, and no request fails."""
    from armillary.fleet.autoscale.controller import Controller
    from tests.fleet.gateway.replicas import gateway_of, until

    async def serve() -> None:
        pool, settings = new_pool(), {"health_interval_s": 0.3, "health_timeout_s": 0.5, "retries": 3}
        async with gateway_of(
            tmp_path, gateway=settings, health=True, managed=True, policy="least-load", probe="ready", max_park_s=60.0
        ) as client:
            controller = Controller(
                pool,
                client.gateway,
                client.models,
                model="bot",
                served="bot",
                target=2,
                log=tmp_path / "decisions.jsonl",
                say=lambda text: None,
                poll_s=0.1,
            )
            task = asyncio.create_task(controller.run())
            await until(lambda: len(controller.routed) == 2, 60.0)
            urls, statuses = {each.url for each in controller.routed.values()}, list[int]()
            next(iter(api.processes.values())).kill()
            while {each.url for each in controller.routed.values()} == urls or len(controller.routed) < 2:
                answer = await client.post({"model": "bot", "prompt": "x", "max_tokens": 1})
                statuses.append(answer.status)
                await asyncio.sleep(0.05)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            assert set(statuses) == {200} and len(pool.members()) == 2
            await asyncio.to_thread(pool.stop_all, 10.0)

    asyncio.run(serve())
