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
    """One accelerator (or one CPU socket)."""

    name: str
    title: str
    vendor: str
    kind: Literal["gpu", "tpu", "npu", "cpu", "wafer"]
    year: int | None = None
    """year of first shipment or announcement"""
    memory_bytes: float | None = None
    memory_type: str = ""
    """HBM3, GDDR6, LPDDR5X, SRAM …"""
    memory_bytes_per_s: float | None = None
    """peak device memory bandwidth"""
    flops: Mapping[str, float] = field(default_factory=dict)
    """dense peak per dtype, operations per second (int8 in integer operations)"""
    sparse_flops: Mapping[str, float] = field(default_factory=dict)
    """peak with structured sparsity, where the vendor quotes one: never used in a roofline"""
    l2_bytes: float | None = None
    """last-level on-chip cache"""
    num_sms: int | None = None
    """multiprocessors, compute units or cores"""
    tdp_w: float | None = None
    """board power"""
    host_link: str = ""
    """link to the host (a name in [link])"""
    node: str = ""
    """node that CHIPxN fills (a name in [node])"""
    frameworks: tuple[str, ...] = ()
    """software that runs on it"""
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
    """A wire between devices; bandwidth is per device and per direction."""

    name: str
    title: str
    bytes_per_s: float | None
    """one direction, one device's share; None: unknown until it is measured"""
    latency_s: float | None
    """time for the smallest message to arrive; None: unknown until it is measured"""
    kind: Literal["scale_up", "scale_out", "host", "torus"]
    """inside a node, between nodes, to the host, or a torus of chips"""
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine to buy or rent: its chips, the links between them, and its network."""

    name: str
    title: str
    chip: str
    num_chips: int
    link: str
    """link between its chips (a name in [link]; the host link where there is no other)"""
    network: str
    """network link to other nodes (a name in [link]), one per chip unless oversubscribed"""
    shape: Literal["switch", "torus", "mesh"] = "switch"
    domain: int = 1
    """nodes per scale-up domain (NVL72: 18 trays of 4; a TPU pod: its hosts)"""
    oversubscription: float = 1.0
    """chips that share one `network` link (p4d: 8 GPUs on 4 cards = 2)"""
    cpu_cores: int | None = None
    """host cores (vCPUs of a rented machine)"""
    memory_bytes: float | None = None
    storage: str = ""
    """local storage (a name in [storage])"""
    num_drives: int = 1
    """number of drives, read and written in parallel"""
    storage_bytes: float | None = None
    """size of all drives"""
    power_w: float | None = None
    """maximum power of the node"""
    list_price_usd: float | None = None
    aliases: tuple[str, ...] = ()
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A storage tier, from device memory down to an object store."""

    name: str
    title: str
    read_bytes_per_s: float
    """sequential read, one device or one client"""
    write_bytes_per_s: float
    """sequential write, one device or one client"""
    latency_s: float
    """first byte"""
    usd_per_gb_month: float | None = None
    """cost per stored gigabyte"""
    source: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price per hour of one accelerator at one provider."""

    chip: str
    provider: str
    usd_per_hour: float
    """on demand, median of the offers"""
    spot_usd_per_hour: float | None = None
    """interruptible, median of the offers"""
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
    """Chips connected by nested tiers, innermost (fastest) first."""

    name: str
    chip: Chip
    tiers: tuple[Tier, ...] = ()
    """innermost first; none for a single chip"""
    node: Node | None = None
    """the node it is built of, where it is one from the catalogue"""

    def __post_init__(self) -> None:
        for tier in self.tiers:
            if tier.count < 1 or tier.oversubscription < 1:
                raise BadInput(f"cluster {self.name}: a tier needs count ≥ 1 and oversubscription ≥ 1")

    @property
    def num_devices(self) -> int:
        return prod(tier.count for tier in self.tiers)

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
