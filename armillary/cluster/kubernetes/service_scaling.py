"""The policy of [autoscale] for Kubernetes' own autoscalers: a HorizontalPodAutoscaler, or a ScaledObject of KEDA."""

from __future__ import annotations

from armillary.cluster.kubernetes.manifests import Manifest
from armillary.cluster.kubernetes.service_objects import KubernetesService, meta_of, object_of


def scaling(service: KubernetesService) -> list[Manifest]:
    settings = service.recipe.autoscale
    if not settings.is_on:
        return []
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{service.name}-replica"}
    return [_keda(service, target)] if service.keda else [_hpa(service, target)]


def _hpa(service: KubernetesService, target: Manifest) -> Manifest:
    """Pods' own gauges, through a metrics adapter; up at once, down to what the last cooldown needed."""
    settings = service.recipe.autoscale

    def pods(name: str, value: str) -> Manifest:
        return {
            "type": "Pods",
            "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": value}},
        }

    percent = {"type": "Percent", "value": round(100 * (settings.max_rate_up - 1)), "periodSeconds": 15}
    single = {"type": "Pods", "value": 1, "periodSeconds": 15}
    spec = {
        "scaleTargetRef": target,
        "minReplicas": max(1, settings.min_replicas),
        "maxReplicas": settings.max_replicas,
        "metrics": [
            pods("armillary_waiting", _milli(settings.max_waiting)),
            pods("armillary_kv_used_fraction", _milli(settings.max_kv_used)),
        ],
        "behavior": {
            "scaleUp": {"stabilizationWindowSeconds": 0, "policies": [percent, single], "selectPolicy": "Max"},
            "scaleDown": {"stabilizationWindowSeconds": min(3600, round(settings.cooldown_s)), "policies": [single]},
        },
    }
    return object_of("HorizontalPodAutoscaler", "autoscaling/v2", meta_of(service, "replica"), spec=spec)


def _milli(value: float) -> str:
    return f"{round(1000 * value)}m"


def _keda(service: KubernetesService, target: Manifest) -> Manifest:
    settings, labels = service.recipe.autoscale, f'pod=~"{service.name}-replica-.*"'
    in_flight = f'armillary_gateway_in_flight{{pod=~"{service.name}-gateway-.*"}}'

    def trigger(query: str, threshold: float) -> Manifest:
        where = {"serverAddress": "http://prometheus-operated:9090", "query": query, "threshold": f"{threshold:g}"}
        return {"type": "prometheus", "metadata": where}

    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": settings.min_replicas,
        "maxReplicaCount": settings.max_replicas,
        "pollingInterval": max(1, round(settings.interval_s)),
        "cooldownPeriod": round(settings.idle_s),
        "triggers": [
            trigger(f"sum(armillary_waiting{{{labels}}})", settings.max_waiting),
            trigger(f"sum(armillary_kv_used_fraction{{{labels}}})", settings.max_kv_used),
            trigger(f"sum({in_flight})", service.recipe.serve.max_running),
        ],
    }
    return object_of("ScaledObject", "keda.sh/v1alpha1", meta_of(service, "replica"), spec=spec)
