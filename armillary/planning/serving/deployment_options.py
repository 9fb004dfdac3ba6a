"""Deployment options: tp degree, dtypes, and disaggregation for serving a model on a kind of device.

Every tp that divides heads and MLPs and every dtype that the chip supports is priced for the traffic; the cheapest that
meets the objectives wins, and each of the others has a reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from armillary.errors import ArmillaryError, BadInput, unknown
from armillary.planning.cost.cost import Offer, ServingCost, device_hour, serving_cost
from armillary.planning.cost.ownership import NoPrice
from armillary.planning.device_model.vectorised_layouts import resolved_precision
from armillary.planning.serving.capacity import Capacity, capacity
from armillary.planning.serving.cpu_threads import Threads
from armillary.planning.serving.disaggregation import Pools, split_pools
from armillary.planning.serving.engines import Rates, own_rates
from armillary.planning.serving.forward_ops import ServingDtypes, Split, check_split
from armillary.planning.serving.queueing import Server
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import refuse_too_big, serving_memory
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Tier
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.division import tp_holds
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Cost, Objective, Traffic

if TYPE_CHECKING:
    from armillary.planning.device_model.correction import Correction
    from armillary.store.peaks import Peaks
    from armillary.store.stored_weights import StoredWeights


TRIED_SLOWDOWNS = (1.6, 1.3)
"""values of serve.prefill_slowdown that are tried where the default keeps gaps too long"""
SMALLEST_BUDGET = 128
"""smallest step budget that is tried"""
WEIGHTS = ("bf16", "fp8", "int8", "int4", "fp4")
"""dtypes of weights that are tried; below 8 bits outputs get worse, which the planner does not model"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is served, on what, and which objectives it must meet."""

    config: ModelConfig
    cluster: Cluster
    serve: Serve
    traffic: Traffic
    objective: Objective
    cost: Cost
    rates: Rates | None = None
    """how the engine uses the chip; None: the physics"""
    measured: Peaks | None = None
    threads: Threads | None = None
    stored: StoredWeights | None = None
    """the files of a quantized checkpoint: then their format is the only one"""
    correction: Correction | None = None
    """factors from engine steps of this cluster"""


@dataclass(frozen=True, kw_only=True)
class DeploymentOption:
    """One way to serve, priced; or the reason why it is refused."""

    split: Split
    dtypes: ServingDtypes
    capacity: Capacity | None = None
    cost: ServingCost | None = None
    reason: str = ""

    @property
    def devices(self) -> int:
        return self.capacity.devices if self.capacity else 0

    def predicted(self) -> dict[str, float]:
        """Gauge -> value."""
        gauges = self.capacity.predicted() if self.capacity else {}
        return gauges | (self.cost.predicted() if self.cost else {})


def deployment_option(request: Request, split: Split, dtypes: ServingDtypes) -> DeploymentOption:
    """One way to serve; ArmillaryError where it is impossible."""
    check_split(request.config, split)
    server = _server(request, split, dtypes)
    refuse_too_big(server.replica, serving_memory(server.replica, request.serve))
    best = _best_budget(server, request.objective)
    return DeploymentOption(split=split, dtypes=dtypes, capacity=best, cost=price(request, best))


def _best_budget(server: Server, objective: Objective) -> Capacity:
    """Where the inter-token latency is limited, smaller prompt chunks help: the limit on the time that prompts add to a
    step is tightened, and the step budget halved, as long as that raises the sustainable rate."""
    best = capacity(server, objective)
    if server.serve.prefill_slowdown is None and server.is_paced:
        for slowdown in TRIED_SLOWDOWNS:
            if _itl_limits(best, objective):
                best = _better(best, server, objective, replace(server.serve, prefill_slowdown=slowdown))
    budget = server.serve.max_tokens_per_step // 2
    while budget >= SMALLEST_BUDGET and _itl_limits(best, objective):
        serve = best.server.serve  # whose steps have a token for each of their rows
        rows = min(serve.max_running, budget)
        best = _better(best, server, objective, replace(serve, max_tokens_per_step=budget, max_running=rows))
        budget //= 2
    return best


def _better(best: Capacity, server: Server, objective: Objective, serve: Serve) -> Capacity:
    changed = capacity(replace(server, serve=serve), objective)
    return changed if changed.highest.requests_per_s > best.highest.requests_per_s else best


def _itl_limits(option: Capacity, objective: Objective) -> bool:
    """Whether the inter-token latency limits the rate, as it is or as it would be in a step full of prompts."""
    server, wanted = option.server, objective.itl_p99_s
    if wanted is None:
        return False
    full_s = server.prefill_s * server.serve.max_tokens_per_step / server.prompt
    return max(option.highest.itl_p99_s, server.decode_s(option.highest.running) + full_s) > 0.9 * wanted


def from_layout(request: Request, layout: Layout) -> DeploymentOption:
    """The option of a recipe's layout: tp, pp, ep and precision (serve.dtype has priority); copies of attention
    (serve.dp_attention) are ep; dp follows from the traffic."""
    return deployment_option(request, *_split_and_dtypes(request, layout))


def server_of(request: Request, layout: Layout) -> Server:
    """The replica of a recipe's layout with its traffic, whether or not it sustains that."""
    return _server(request, *_split_and_dtypes(request, layout))


def _split_and_dtypes(request: Request, layout: Layout) -> tuple[Split, ServingDtypes]:
    dtype = request.serve.dtype
    precision = resolved_precision(layout) if dtype == "auto" else dtype
    if request.stored is not None:
        precision = request.stored.format
    dtypes = serving_dtypes(precision, request.cluster.chip, request.serve.kv_dtype)
    copies = request.serve.dp_attention
    return Split(tp=layout.tp, pp=layout.pp, ep=layout.ep if copies == 1 else copies), dtypes


def deployment_options(request: Request, weights: Sequence[str] = WEIGHTS) -> list[DeploymentOption]:
    """Every option: the possible ones first, cheapest first; the others with their reason."""
    options = []
    for split, dtypes in _candidates(request, weights):
        try:
            options.append(deployment_option(request, split, dtypes))
        except ArmillaryError as error:
            options.append(DeploymentOption(split=split, dtypes=dtypes, reason=str(error)))
    return sorted(options, key=_rank)


def best(request: Request, weights: Sequence[str] = WEIGHTS) -> DeploymentOption:
    """The cheapest option that meets every objective; BadInput with the nearest miss where none does."""
    ranked = deployment_options(request, weights)
    if ranked[0].capacity is None:
        raise BadInput(ranked[0].reason)
    return ranked[0]


def pools(request: Request, deployment_option: DeploymentOption) -> Pools:
    """The same parallelism and dtypes with separate pools for prefill and decode."""
    server = _server(request, deployment_option.split, deployment_option.dtypes)
    return split_pools(server, server, request.objective)


def price(request: Request, option: Capacity) -> ServingCost | None:
    """Dollars of a deployment; None where no price is known."""
    try:
        hour: Offer = device_hour(request.cost, request.cluster, option.devices)
    except NoPrice:
        return None
    traffic, actual = request.traffic, option.actual
    busy = actual.prefill_fraction + actual.running / max(1, option.server.most_running) * (1 - actual.prefill_fraction)
    return serving_cost(
        num_devices=option.devices,
        usd_per_device_hour=hour.usd_per_useful_hour,
        tokens_in_per_s=traffic.tokens_in_per_s,
        tokens_out_per_s=traffic.tokens_out_per_s,
        prefill_fraction=actual.prefill_fraction,
        busy_fraction=max(busy, actual.prefill_fraction),
    )


# --- candidates


def _candidates(request: Request, weights: Sequence[str]) -> Iterator[tuple[Split, ServingDtypes]]:
    """Dtypes that the chip supports, on every parallelism of one fast domain."""
    chip = request.cluster.chip
    for name in weights if request.stored is None else (request.stored.format,):
        if request.stored is None and name in ("fp8", "fp4") and not chip.peak(name):
            continue  # the chip would only store them: int8 and int4 do the same and run everywhere
        for split in _splits(request):
            yield split, serving_dtypes(name, chip, request.serve.kv_dtype)


def _splits(request: Request) -> Iterator[Split]:
    """tp inside the fast domain, pipeline stages beyond it, and for experts ep with data-parallel attention."""
    config, limit = request.config, request.cluster.num_devices
    domain = min(limit, request.cluster.fast_domain)
    rules = Case(model=config, for_training=False)
    powers = (2**i for i in range(domain.bit_length()) if 2**i <= domain)
    sizes = [size for size in powers if tp_holds(Layout(tp=size), rules)]
    yield from (Split(tp=size) for size in sizes)
    top = sizes[-1]
    yield from (Split(tp=top, pp=stages) for stages in (2, 4, 8, 16) if top * stages <= limit)
    if config.moe is not None:
        ranks = (2**i for i in range(1, limit.bit_length()) if 2**i <= limit)
        yield from (Split(ep=size) for size in ranks if size <= config.moe.num_experts)


def _rank(option: DeploymentOption) -> tuple[bool, float, int]:
    dollars, devices = (
        option.cost.million_tokens_usd if option.cost else float(option.devices),
        option.split.num_devices,
    )
    return option.capacity is None, dollars, devices if option.capacity else -devices


def _server(request: Request, split: Split, dtypes: ServingDtypes) -> Server:
    replica = Replica(
        config=request.config,
        cluster=_replica_cluster(request.cluster, split.num_devices),
        split=split,
        dtypes=dtypes,
        rates=request.rates or own_rates(),
        measured=request.measured,
        stored=request.stored,
        correction=request.correction,
        dispatch="all-to-all" if request.serve.dp_attention == 1 else "gather-sum",
    )
    return Server(replica=replica, serve=request.serve, traffic=request.traffic)


def _replica_cluster(cluster: Cluster, devices: int) -> Cluster:
    """A cluster that holds one replica: the given one, or as many of its nodes as the replica needs."""
    if devices <= max(1, cluster.num_devices):
        return cluster
    node = cluster.node
    if node is None:
        raise BadInput(
            f"{devices} devices per replica are more than the {cluster.num_devices} of {cluster.name}; "
            "name more with --on"
        )
    inner = node.num_chips * node.domain
    tiers = [Tier(link=catalogue.link(node.link), count=min(devices, inner), shape=node.shape)]
    if devices > inner:
        tiers.append(
            Tier(link=catalogue.link(node.network), count=-(-devices // inner), oversubscription=node.oversubscription)
        )
    return Cluster(name=cluster.name, chip=cluster.chip, tiers=tuple(tiers), node=node)


STORED = {
    "bf16": "bf16",
    "fp16": "fp16",
    "fp32": "fp32",
    "tf32": "fp32",
    "fp8": "fp8",
    "fp4": "fp4",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "int8": "int8",
    "int4": "int4",
}
"""name of a precision -> dtype of the stored weights"""


def serving_dtypes(weights: str, chip: Chip, kv: str = "auto") -> ServingDtypes:
    """Integers are weight-only; fp8 and fp4 GEMMs run where the chip has them, else the weights are only stored so. The
    KV cache is fp8 beside fp8 and fp4 weights, unless `kv` is set."""
    if weights not in STORED:
        raise unknown("precision", weights, STORED)
    stored = STORED[weights]
    narrow = stored in ("fp8", "fp4")
    compute = stored if stored in ("fp32", "fp16") or (narrow and chip.peak(stored)) else "bf16"
    cache = ("fp8" if narrow else compute) if kv == "auto" else STORED.get(kv, "bf16")
    return ServingDtypes(weights=stored, compute=compute, kv=cache)
