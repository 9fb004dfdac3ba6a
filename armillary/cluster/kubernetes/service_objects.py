"""What all objects of a service on Kubernetes share: the service they are rendered from, names and labels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from armillary.cluster.kubernetes.manifests import Manifest
from armillary.errors import BadInput, BadRecipe
from armillary.spec.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class KubernetesService:
    """What is rendered."""

    name: str
    reference: str
    """what replicas serve: a folder in the image or on a volume, or registry:NAME@ALIAS"""
    recipe: Recipe
    replica_recipe: str
    """its text"""
    gpus: int = 0
    """per replica"""
    gateway: Mapping[str, Any] = field(default_factory=dict)
    """settings of the gateway"""
    keda: bool = False
    secrets: str = ""
    """name of the Secret with keys.json of the gateway; empty: NAME-keys, rendered empty"""


def check(service: KubernetesService) -> None:
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", service.name) or len(service.name) > 50:
        raise BadInput(f"'{service.name}' is no name on Kubernetes (a-z, 0-9 and -); try --set serve.name=bot")
    if not service.recipe.launch.image:
        raise BadRecipe("pods need a container image; try --set launch.image=REGISTRY/armillary:TAG")


def labels_of(service: KubernetesService, part: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "armillary",
        "app.kubernetes.io/instance": service.name,
        "app.kubernetes.io/component": part,
    }


def meta_of(service: KubernetesService, part: str, name: str = "") -> Manifest:
    labels = {**labels_of(service, part), "app.kubernetes.io/managed-by": "armillary-up"}
    return {"name": name or f"{service.name}-{part}", "labels": labels}


def object_of(kind: str, version: str, meta: Manifest, **more: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": meta, **more}
