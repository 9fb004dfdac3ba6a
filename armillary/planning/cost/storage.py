"""Storage: sizes of dataset, checkpoints and logs, and the bandwidth that each needs so that devices do not starve.

    dataset       tokens · bytes per token               read at tokens/s · bytes · prefetch headroom (2 ×)
    checkpoint    parameters · (weights 2 + master 4 + moments 8 bytes)      14 bytes per parameter for bf16 with AdamW
    write         checkpoint / allowed stall, or / interval where it is written asynchronously
    read          checkpoint · copies / allowed time to restart
    logs          steps · gauges · 24 bytes + an occasional trace

A tier is fast enough when the bandwidth of all nodes together is at least the need.
"""

from dataclasses import dataclass
from math import isfinite

from armillary.errors import BadInput
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hardware import Cluster, Storage
from armillary.spec.model import ModelConfig

MASTER, MOMENTS = 4, 8
"""bytes per parameter of fp32 master weights and of AdamW's two moments"""
CHECKPOINTS = 3
"""retained at a time"""
AHEAD = 2.0
"""how many times as fast as devices consume a loader must read, to recover from hiccups"""
GAUGE_BYTES, GAUGES_PER_STEP = 24, 60
"""bytes of a number with its name, compressed; gauges per step"""
ONE_SERVER = ("nas", "nas-100g")
"""tiers whose bandwidth all nodes share; of the others every node has its own"""


@dataclass(frozen=True, kw_only=True)
class Need:
    """Size of one kind of stored data, of all copies that are kept, and the bandwidth that all nodes together need."""

    name: str
    size_bytes: float
    kept_bytes: float
    read_bytes_per_s: float
    write_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a tier is fast enough for a need, with the bandwidth of all nodes together."""

    need: Need
    tier: Storage
    read_bytes_per_s: float
    write_bytes_per_s: float

    @property
    def holds(self) -> bool:
        return (
            self.read_bytes_per_s >= self.need.read_bytes_per_s
            and self.write_bytes_per_s >= self.need.write_bytes_per_s
        )

    @property
    def short(self) -> float:
        """Needed over available bandwidth; at most 1 where it is fast enough."""
        return max(
            self.need.read_bytes_per_s / self.read_bytes_per_s, self.need.write_bytes_per_s / self.write_bytes_per_s
        )


@dataclass(frozen=True, kw_only=True)
class RunStorage:
    """Storage needs of a run: token shards, weights with optimizer states, gauges."""

    dataset: Need
    checkpoint: Need
    logs: Need

    @property
    def needs(self) -> tuple[Need, Need, Need]:
        return self.dataset, self.checkpoint, self.logs


def checkpoint_bytes(config: ModelConfig, *, weight_bytes: float = 2.0, optimizer: bool = True) -> float:
    """Weights, and to resume from it the fp32 master weights (where weights are narrower) and AdamW's moments."""
    master = MASTER if weight_bytes < MASTER else 0
    return parameters(config).total * (weight_bytes + (master + MOMENTS if optimizer else 0))


def run_storage(
    config: ModelConfig,
    *,
    tokens_per_s: float,
    total_tokens: float,
    interval_s: float,
    stall_s: float | None = None,
    restart_s: float = 300.0,
    steps: int = 0,
    copies: int = 1,
) -> RunStorage:
    """Sizes and bandwidths of a run that consumes `tokens_per_s`: a checkpoint every `interval_s`, written within
    `stall_s` (None: before the next one, asynchronously) and read by `copies` of the model within `restart_s`."""
    given = {
        "tokens_per_s": tokens_per_s,
        "total_tokens": total_tokens,
        "interval_s": interval_s,
        "stall_s": stall_s,
        "restart_s": restart_s,
        "copies": copies,
    }
    for name, value in given.items():
        if value is not None and not (isfinite(value) and value > 0):
            raise BadInput(f"{name}={value} must be above 0; a run reads, writes and restarts in time")
    each, size = 2.0 if config.vocab <= 65_536 else 4.0, checkpoint_bytes(config)
    dataset = Need(
        name="dataset",
        size_bytes=total_tokens * each,
        kept_bytes=total_tokens * each,
        read_bytes_per_s=tokens_per_s * each * AHEAD,
        write_bytes_per_s=0.0,
    )
    checkpoint = Need(
        name="checkpoint",
        size_bytes=size,
        kept_bytes=CHECKPOINTS * size,
        read_bytes_per_s=size * copies / restart_s,
        write_bytes_per_s=size / (stall_s or interval_s),
    )
    line = GAUGES_PER_STEP * GAUGE_BYTES
    rate = line * steps / (total_tokens / tokens_per_s) if steps else 0.0
    logs = Need(
        name="logs", size_bytes=line * steps, kept_bytes=line * steps, read_bytes_per_s=0.0, write_bytes_per_s=rate
    )
    return RunStorage(dataset=dataset, checkpoint=checkpoint, logs=logs)


# --- tiers


def fit(need: Need, tier: Storage, *, nodes: int, drives: int = 1) -> Fit:
    """What `nodes` get of a tier together: each its own drives or client, or all of them one server."""
    if nodes < 1 or drives < 1:
        raise BadInput(f"{nodes} nodes with {drives} drives read nothing; give at least one of each")
    clients = 1 if tier.name in ONE_SERVER else nodes * drives
    return Fit(
        need=need,
        tier=tier,
        read_bytes_per_s=tier.read_bytes_per_s * clients,
        write_bytes_per_s=tier.write_bytes_per_s * clients,
    )


def fits(need: Need, cluster: Cluster) -> list[Fit]:
    """Every tier of the catalogue below host memory for a need of this cluster, the slowest that is fast enough
    first."""
    node = cluster.node
    nodes = max(1, cluster.num_devices // node.num_chips) if node else 1
    tiers = [
        fit(need, tier, nodes=nodes, drives=node.num_drives if node and node.storage == tier.name else 1)
        for tier in catalogue.storages().values()
        if tier.name not in ("hbm", "dram")
    ]
    return sorted(tiers, key=lambda fit: (not fit.holds, fit.read_bytes_per_s if fit.holds else fit.short))
