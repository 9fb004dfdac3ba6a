"""A service's manifests: valid for three Kubernetes versions, and the same policy as the autoscaler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from armillary.cli.up import up
from armillary.cluster.kubernetes.service_manifests import probes, service_manifests
from armillary.cluster.kubernetes.service_objects import KubernetesService
from armillary.errors import ArmillaryError
from armillary.fleet.gateway.gateway_config import load_config
from armillary.fleet.gateway.keys import KeyFile
from armillary.spec.recipe import load_recipe, recipe_from_dict

TABLES: dict[str, Any] = {
    "model": {"path": "/models/bot"},
    "serve": {"name": "bot", "drain_s": 40.0},
    "launch": {"image": "example.org/armillary:1", "mounts": ["models:/models"]},
    "autoscale": {"max_replicas": 8, "max_waiting": 3.0, "cooldown_s": 90.0, "min_replicas": 1},
}
KINDS = [
    "ConfigMap",
    "Secret",
    "Deployment",
    "Deployment",
    "Service",
    "Service",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ServiceMonitor",
]
NOT_KUBERNETES = ("ServiceMonitor", "ScaledObject")
"""kinds of operators, which have no schema there"""


def a_service(**more: Any) -> KubernetesService:
    recipe = recipe_from_dict(TABLES)
    given: dict[str, Any] = {"name": "bot", "reference": "/models/bot", "replica_recipe": "", "gpus": 2, **more}
    return KubernetesService(recipe=recipe, **given)


def objects(**more: Any) -> dict[str, dict[str, Any]]:
    return {f"{each['kind']} {each['metadata']['name']}": each for each in service_manifests(a_service(**more))}


@pytest.mark.peers
@pytest.mark.parametrize("keda", [False, True])
def test_every_manifest_is_valid(keda: bool) -> None:
    from tests.cluster.test_kubernetes import validate

    for each in service_manifests(a_service(keda=keda)):
        if each["kind"] not in NOT_KUBERNETES:
            validate(each)


def test_what_is_rendered() -> None:
    assert [each["kind"] for each in service_manifests(a_service())] == KINDS
    pod = objects()["Deployment bot-replica"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["args"][:2] == ["serve", "/models/bot"] and set(probes()) <= set(container)
    assert pod["terminationGracePeriodSeconds"] >= 40 + 5  # drain_s and preStop
    assert objects()["Deployment bot-replica"]["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_selectors_find_their_pods() -> None:
    found = objects()
    pods = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in found.items() if "Deploy" in name}
    for part in ("replica", "gateway"):
        selector = found[f"Service bot-{part}"]["spec"]["selector"]
        matching = [name for name, labels in pods.items() if selector.items() <= labels.items()]
        assert matching == [f"Deployment bot-{part}"]
    allowed = found["NetworkPolicy bot-replica"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert allowed.items() <= pods["Deployment bot-gateway"].items()


def test_scaling_carries_the_policy() -> None:
    spec = objects()["HorizontalPodAutoscaler bot-replica"]["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 8) and "replicas" not in objects()[
        "Deployment bot-replica"
    ]["spec"]
    assert spec["metrics"][0]["pods"]["target"]["averageValue"] == "3000m"
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 90
    keda = objects(keda=True)["ScaledObject bot-replica"]["spec"]
    assert keda["maxReplicaCount"] == 8 and len(keda["triggers"]) == 3


def test_the_gateway_reads_its_configuration(tmp_path: Path) -> None:
    file = tmp_path / "gateway.toml"
    found = objects()
    file.write_text(found["ConfigMap bot-config"]["data"]["gateway.toml"])
    (model,) = load_config(file).models
    keys = tmp_path / "keys.json"
    keys.write_text(found["Secret bot-keys"]["stringData"]["keys.json"])
    assert KeyFile(keys).read() == {}
    assert model.name == "bot" and model.replicas[0].url == "http://bot-replica:8000"


def test_the_verb_writes_a_file(tmp_path: Path) -> None:
    file = tmp_path / "bot.yaml"
    sets = [text for each in ("launch.image=example.org/a:1", "serve.name=bot") for text in ("--set", each)]
    service = tmp_path / "service.toml"
    service.write_text(Path("recipes/service.toml").read_text() + "max_in_flight = 77\n")
    result = CliRunner().invoke(up, [str(service), "--to", "kubernetes", "--out", str(file), *sets])
    assert result.exit_code == 0, result.output
    written = list(yaml.safe_load_all(file.read_text()))
    assert [each["kind"] for each in written] == KINDS
    replica = tmp_path / "replica.toml"
    replica.write_text(written[0]["data"]["replica.toml"])
    assert load_recipe(replica).serve.name == "bot"
    gateway = tmp_path / "gateway.toml"
    gateway.write_text(written[0]["data"]["gateway.toml"])
    assert load_config(gateway).gateway.max_in_flight == 77


def test_what_cannot_be_rendered() -> None:
    for more, words in (({"name": "Bot_1"}, "no name on Kubernetes"),):
        with pytest.raises(ArmillaryError, match=words):
            service_manifests(a_service(**more))
