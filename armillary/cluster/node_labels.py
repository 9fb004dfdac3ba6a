"""Domains of the network from the labels of nodes."""

from __future__ import annotations

from collections.abc import Mapping

from armillary.spec.network_domains import NVLINK, Domain

PACKED = "rack"
"""kind of the domains that launch.pack_within names a label for"""
KUBERNETES = {
    "topology.kubernetes.io/zone": "zone",
    "topology.k8s.aws/network-node-layer-1": "layer1",
    "topology.k8s.aws/network-node-layer-2": "layer2",
    "topology.k8s.aws/network-node-layer-3": "layer3",
    "network.topology.nvidia.com/core": "core",
    "network.topology.nvidia.com/spine": "spine",
    "network.topology.nvidia.com/leaf": "leaf",
    "nvidia.com/gpu.clique": NVLINK,
}
"""label -> kind of domain, from the outermost: the zone of cloud providers, switches as EKS and NVIDIA's topograph
label them, and nodes with one NVLink as NVIDIA's device plugin does"""
RAY = {"ray.io/availability-region": "region", "ray.io/availability-zone": "zone"}


def domain_of(labels: Mapping[str, str], levels: Mapping[str, str], packed_by: str = "") -> Domain:
    """The domains of a node; what `packed_by` labels is inside all but an NVLink."""
    levels = {label: kind for label, kind in levels.items() if label != packed_by}
    last = {label: kind for label, kind in levels.items() if kind == NVLINK}
    outer = {label: kind for label, kind in levels.items() if kind != NVLINK}
    ordered = {**outer, **({packed_by: PACKED} if packed_by else {}), **last}
    return tuple(f"{kind}={labels[label]}" for label, kind in ordered.items() if labels.get(label))
