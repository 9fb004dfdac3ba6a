"""The objects of a service on Kubernetes, as plain dictionaries: the same recipe as `armillary up`.

Replicas are a Deployment behind a Service, which shares requests out; the gateway in front, with keys and limits, is
another. The policy of [autoscale] becomes a HorizontalPodAutoscaler on the requests that wait and the KV cache, or with
`keda` a ScaledObject, which also scales to zero.
"""

from __future__ import annotations

from typing import Any

from armillary.cluster.kubernetes.manifests import Manifest
from armillary.cluster.kubernetes.service_objects import KubernetesService, check, labels_of, meta_of, object_of
from armillary.cluster.kubernetes.service_scaling import scaling
from armillary.spec.toml.toml_files import dumps

PORT, GATEWAY_PORT = 8000, 9000
USER_ID = 1000
_START_S, _GRACE_S = 1800, 15
"""how long a replica may load; time beyond serve.drain_s until a pod is killed"""
_RECIPE = "/etc/armillary"
_KEYS = "/var/lib/armillary/gateway"


def service_manifests(service: KubernetesService) -> list[Manifest]:
    """Everything, in the order in which it is applied."""
    check(service)
    return [
        _config(service),
        _secret(service),
        _deployment(service, "replica", _replica_pod(service)),
        _deployment(service, "gateway", _gateway_pod(service)),
        _replica_service(service),
        _gateway_service(service),
        *scaling(service),
        _budget(service, "replica"),
        _budget(service, "gateway"),
        _network_policy(service),
        _monitor(service),
    ]


def pool_manifests(service: KubernetesService) -> tuple[Manifest, Manifest]:
    """What a pool of pods starts from: the replicas' ConfigMap, and the Deployment of which each replica is a copy."""
    check(service)
    config = object_of("ConfigMap", "v1", meta_of(service, "config"), data={"replica.toml": service.replica_recipe})
    deployment = _deployment(service, "replica", _replica_pod(service))
    deployment["spec"]["replicas"] = 1
    return config, deployment


# --- configuration


def _config(service: KubernetesService) -> Manifest:
    """The recipe of the replicas, and the gateway's configuration, which finds them by their Service."""
    fleet = service.recipe.fleet
    url = f"http://{service.name}-replica:{PORT}"
    model = {"name": service.name, "policy": fleet.policy, "replicas": [{"url": url}], "probe": "ready"}
    data = {
        "replica.toml": service.replica_recipe,
        "gateway.toml": dumps({"gateway": dict(service.gateway)}) + _model_text(model),
    }
    return object_of("ConfigMap", "v1", meta_of(service, "config"), data=data)


def _model_text(model: dict[str, Any]) -> str:
    keys = ("name", "policy", "probe")
    lines = ["", "[[models]]", *(f'{key} = "{model[key]}"' for key in keys)]
    urls = ", ".join(f'{{ url = "{each["url"]}" }}' for each in model["replicas"])
    return "\n".join([*lines, f"replicas = [{urls}]", ""])


def _secret(service: KubernetesService) -> Manifest:
    """Keys of the gateway: the content of keys.json, which holds hashes only."""
    meta = meta_of(service, "keys", service.secrets)
    return object_of("Secret", "v1", meta, type="Opaque", stringData={"keys.json": "{}"})


# --- pods


def _deployment(service: KubernetesService, part: str, pod: Manifest) -> Manifest:
    """A rolling update starts one more first, and never has fewer."""
    labels, scaled = labels_of(service, part), part == "replica" and service.recipe.autoscale.is_on
    count = {} if scaled else {"replicas": max(1, service.recipe.fleet.replicas) if part == "replica" else 2}
    spec = {
        **count,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return object_of("Deployment", "apps/v1", meta_of(service, part), spec=spec)


def _pod(service: KubernetesService, container: Manifest, volumes: list[Manifest], grace_s: float) -> Manifest:
    security = {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "fsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    own = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {
        "securityContext": security,
        "terminationGracePeriodSeconds": int(grace_s),
        "containers": [{**container, "securityContext": own}],
        "volumes": volumes,
    }


def _replica_pod(service: KubernetesService) -> Manifest:
    """Alive while /health answers, ready while /ready does. It gets SIGTERM after Services have forgotten it, and has
    serve.drain_s to finish its requests."""
    recipe = service.recipe
    gpus = {"resources": {"limits": {recipe.launch.gpu_resource: service.gpus}}} if service.gpus else {}
    mounts = [{"name": "config", "mountPath": _RECIPE, "readOnly": True}]
    for number, mount in enumerate(recipe.launch.mounts):
        mounts.append({"name": f"mount-{number}", "mountPath": mount.partition(":")[2], "readOnly": True})
    serve = ["serve", service.reference, "--host", "0.0.0.0", "--port", str(PORT), "--tp", str(recipe.layout.tp)]
    container = {
        "name": "server",
        "image": recipe.launch.image,
        "args": [*serve, "--recipe", f"{_RECIPE}/replica.toml"],
        "ports": [{"name": "http", "containerPort": PORT}],
        **probes(),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
        **gpus,
    }
    volumes = [_config_volume(service), {"name": "shm", "emptyDir": {"medium": "Memory"}}, *_mounted(service)]
    return _pod(service, container, volumes, recipe.serve.drain_s + _GRACE_S)


def _mounted(service: KubernetesService) -> list[Manifest]:
    """launch.mounts, where the model is."""
    volumes: list[Manifest] = []
    for number, mount in enumerate(service.recipe.launch.mounts):
        source = mount.partition(":")[0]
        where = {"hostPath": {"path": source}} if "/" in source else {"persistentVolumeClaim": {"claimName": source}}
        volumes.append({"name": f"mount-{number}", **where})
    return volumes


def probes() -> Manifest:
    """Of a server: it may load for half an hour; an engine that restarts makes it not ready, and not dead."""

    def probe(path: str, period_s: int, failures: int) -> Manifest:
        get = {"path": path, "port": "http"}
        return {"httpGet": get, "periodSeconds": period_s, "timeoutSeconds": 5, "failureThreshold": failures}

    return {
        "startupProbe": probe("/ready", 5, _START_S // 5),
        "livenessProbe": probe("/health", 20, 6),
        "readinessProbe": probe("/ready", 5, 2),
    }


def _gateway_pod(service: KubernetesService) -> Manifest:
    run = ["gateway", "run", "--host", "0.0.0.0", "--port", str(GATEWAY_PORT), "--config", f"{_RECIPE}/gateway.toml"]
    get = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    container = {
        "name": "gateway",
        "image": service.recipe.launch.image,
        "args": [*run, "--keys", f"{_KEYS}/keys.json"],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "livenessProbe": get,
        "readinessProbe": get,
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "volumeMounts": [
            {"name": "config", "mountPath": _RECIPE, "readOnly": True},
            {"name": "keys", "mountPath": _KEYS, "readOnly": True},
        ],
    }
    keys = {"name": "keys", "secret": {"secretName": service.secrets or f"{service.name}-keys"}}
    return _pod(service, container, [_config_volume(service), keys], 30 + _GRACE_S)


def _config_volume(service: KubernetesService) -> Manifest:
    return {"name": "config", "configMap": {"name": f"{service.name}-config"}}


# --- around them


def _replica_service(service: KubernetesService) -> Manifest:
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec = {"selector": labels_of(service, "replica"), "ports": ports}
    return object_of("Service", "v1", meta_of(service, "replica"), spec=spec)


def _gateway_service(service: KubernetesService) -> Manifest:
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    spec = {"selector": labels_of(service, "gateway"), "ports": ports}
    return object_of("Service", "v1", meta_of(service, "gateway"), spec=spec)


def _budget(service: KubernetesService, part: str) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels_of(service, part)}}
    return object_of("PodDisruptionBudget", "policy/v1", meta_of(service, part), spec=spec)


def _network_policy(service: KubernetesService) -> Manifest:
    """Replicas take requests from the gateway and from what scrapes metrics, and from nobody else."""
    gateway = {"podSelector": {"matchLabels": labels_of(service, "gateway")}}
    scraper: Manifest = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    ports = [{"port": PORT, "protocol": "TCP"}]
    spec = {
        "podSelector": {"matchLabels": labels_of(service, "replica")},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [gateway, scraper], "ports": ports}],
    }
    return object_of("NetworkPolicy", "networking.k8s.io/v1", meta_of(service, "replica"), spec=spec)


def _monitor(service: KubernetesService) -> Manifest:
    """For the Prometheus operator."""
    own = {key: value for key, value in labels_of(service, "").items() if value}
    spec = {"selector": {"matchLabels": own}, "endpoints": [{"port": "http", "path": "/metrics", "interval": "15s"}]}
    return object_of("ServiceMonitor", "monitoring.coreos.com/v1", meta_of(service, "metrics"), spec=spec)
