"""Chips, links, nodes, storage tiers, and the nested tiers of a cluster.

All rates are dense and one-directional per device, in SI units; an unpublished figure is None,
never a guess. The rows are in hardware.toml, each figure with its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from armillary.errors import BadInput

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
DTYPE_BYTES: Mapping[str, float] = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "int8": 1,
    "fp4": 0.5,
    "int4": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator (or one CPU socket). `host_link` is a name in [link], and `node`, which CHIPxN fills, one in
    [node]; `num_sms` are multiprocessors, compute units or cores."""

    name: str
    title: str
    vendor: str
    kind: Literal["gpu", "tpu", "npu", "cpu", "wafer"]
    year: int | None = None
    memory_bytes: float | None = None
    memory_type: str = ""
    memory_bytes_per_s: float | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    """dense peak per dtype, operations per second (int8 in integer operations)"""
    sparse_flops: Mapping[str, float] = field(default_factory=dict)
    """peak with structured sparsity, where the vendor quotes one: never used in a roofline"""
    l2_bytes: float | None = None
    num_sms: int | None = None
    tdp_w: float | None = None
    power_limit_w: float | None = None
    """watts it is limited to, where that is below `tdp_w`"""
    host_link: str = ""
    node: str = ""
    frameworks: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    """dtypes it computes in (a superset of the peaks: a rate may be unpublished)"""
    list_price_usd: float | None = None
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    """figure -> where it is published; 'all' covers what is not listed"""
    note: str = ""

    def peak(self, dtype: str) -> float | None:
        """Dense peak for `dtype`, or None where it is unknown or unsupported."""
        return self.flops.get(dtype)

    def source_of(self, figure: str) -> str:
        return self.sources.get(figure) or self.sources.get("all", "")


@dataclass(frozen=True, kw_only=True)
class Link:
    """A wire between devices, inside a node (scale-up), between nodes, to the host, or a torus of chips; bandwidth is
    per device and per direction, None until it is measured."""

    name: str
    title: str
    bytes_per_s: float | None
    latency_s: float | None
    kind: Literal["scale_up", "scale_out", "host", "torus"]
    is_measured: bool = False
    """whether bandwidth and latency are what collectives reached on it, not what the wire has"""
    in_network_reduction: bool = False
    """whether its switch adds what it forwards (NVLink SHARP), so that an all-reduce sends and receives once"""
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine to buy or rent: its chips, the link between them, its network link (one per chip unless
    oversubscribed) and its local storage; these are names in [chip], [link] and [storage]."""

    name: str
    title: str
    chip: str
    num_chips: int
    link: str
    network: str
    shape: Literal["switch", "torus", "mesh"] = "switch"
    domain: int = 1
    """nodes per scale-up domain (NVL72: 18 trays of 4; a TPU pod: its hosts)"""
    oversubscription: float = 1.0
    """chips that share one `network` link (p4d: 8 GPUs on 4 cards = 2)"""
    cpu_cores: int | None = None
    memory_bytes: float | None = None
    storage: str = ""
    num_drives: int = 1
    storage_bytes: float | None = None
    power_w: float | None = None
    list_price_usd: float | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage tier, from device memory down to an object store; rates are sequential, of one device or one client."""

    name: str
    title: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    latency_s: float
    usd_per_gb_month: float | None = None
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price per hour of one accelerator at one provider, on demand and interruptible: the median of its offers."""

    chip: str
    provider: str
    usd_per_hour: float
    spot_usd_per_hour: float | None = None
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One tier of a cluster: `count` units connected by `link`."""

    link: Link
    count: int
    oversubscription: float = 1.0
    """bandwidth into the tier over bandwidth through it (2 = half)"""
    shape: Literal["switch", "torus", "mesh"] = "switch"

    @property
    def bytes_per_s(self) -> float | None:
        speed = self.link.bytes_per_s
        return None if speed is None else speed / self.oversubscription


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Chips connected by nested tiers, innermost (fastest) first; `node` is given where it is one from the
    catalogue."""

    name: str
    chip: Chip
    tiers: tuple[Tier, ...] = ()
    node: Node | None = None

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier.count < 1 or tier.oversubscription < 1:
                raise BadInput(f"cluster {self.name}: a tier needs count ≥ 1 and oversubscription ≥ 1")

    @property
    def num_devices(self) -> int:
        return prod(tier.count for tier in self.tiers)

    @property
    def num_nodes(self) -> int:
        """Machines: by the node's number of chips where it is known, else by the tiers that are a network."""
        if self.node is not None:
            return -(-self.num_devices // self.node.num_chips)
        return prod(tier.count for tier in self.tiers if tier.link.kind == "scale_out")

    @property
    def fast_domain(self) -> int:
        """Devices that share the innermost link."""
        return self.tiers[0].count if self.tiers else 1

    def tier_spanning(self, num_devices: int) -> Tier | None:
        """The innermost tier that contains `num_devices` neighbours: the slowest link they cross."""
        if num_devices <= 1:
            return None
        reach = 1
        for tier in self.tiers:
            reach *= tier.count
            if num_devices <= reach:
                return tier
        raise BadInput(f"{num_devices} devices are more than the {self.num_devices} of {self.name}")

    def text(self) -> str:
        """'64 × H100 SXM: 8 by NVLink 4, 8 by InfiniBand NDR'."""
        inner = ", ".join(f"{tier.count} by {tier.link.title}" for tier in self.tiers if tier.count > 1)
        return f"{self.num_devices} × {self.chip.title}" + (f": {inner}" if inner else "")
