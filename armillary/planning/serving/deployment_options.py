"""Ways to serve a model on a kind of device: tp degree, precision and quantisation, together or in split pools.

Every cut that divides heads and MLPs and every format the chip can hold is priced for the traffic; the cheapest that
meets the objectives wins, and each of the others says what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from armillary.errors import ArmillaryError, BadInput, unknown
from armillary.planning.cost.cost import Offer, ServingCost, device_hour, serving_cost
from armillary.planning.cost.ownership import NoPrice
from armillary.planning.device_model.layout_arrays import resolved_precision
from armillary.planning.serving.capacity import Capacity, capacity
from armillary.planning.serving.disaggregation import Pools, split_pools
from armillary.planning.serving.engines import Rates, physics
from armillary.planning.serving.forward_ops import Formats, Split, check_split
from armillary.planning.serving.queueing import Server
from armillary.planning.serving.replica import Replica
from armillary.planning.serving.serving_memory import refuse_too_big, serving_memory
from armillary.planning.serving.threads import Threads
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Tier
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.tensor import tp_holds
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Cost, Objective, Serve, Traffic

if TYPE_CHECKING:
    from armillary.store.peaks import Peaks


SMALLEST_BUDGET = 128
"""tokens of a step below which prompts are no longer cut up"""
WEIGHTS = ("bf16", "fp8", "int8", "int4", "fp4")
"""formats that are tried; below 8 bits answers get worse, which no planner sees"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be served, where, and what it must meet."""

    config: ModelConfig
    """the model"""
    cluster: Cluster
    """the devices there are"""
    serve: Serve
    """how engines are set up"""
    traffic: Traffic
    """what arrives"""
    objective: Objective
    """what must be met"""
    cost: Cost
    """what devices cost"""
    rates: Rates | None = None
    """how the engine uses the chip; none: the physics"""
    measured: Peaks | None = None
    """ceilings of this very device"""
    threads: Threads | None = None
    """of the engine, where this machine's CPU serves"""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to serve, priced; or the reason why it will not do."""

    split: Split
    """cut of a replica"""
    formats: Formats
    """number formats"""
    capacity: Capacity | None = None
    """replicas and times; none: refused"""
    cost: ServingCost | None = None
    """dollars; none: no price is known"""
    reason: str = ""
    """why it will not do"""

    @property
    def devices(self) -> int:
        return self.capacity.devices if self.capacity else 0

    def predicted(self) -> dict[str, float]:
        """Gauge -> value."""
        found = self.capacity.predicted() if self.capacity else {}
        return found | (self.cost.predicted() if self.cost else {})


def choice(request: Request, split: Split, formats: Formats) -> Choice:
    """One way to serve; ArmillaryError where it cannot be."""
    check_split(request.config, split)
    server = _server(request, split, formats)
    refuse_too_big(server.replica, serving_memory(server.replica, request.serve))
    found = _best_budget(server, request.objective)
    return Choice(split=split, formats=formats, capacity=found, cost=price(request, found))


def _best_budget(server: Server, objective: Objective) -> Capacity:
    """Where gaps are limited, smaller chunks of prompt lengthen them less: the step budget, halved as long as that
    raises the rate a replica bears."""
    found = capacity(server, objective)
    budget = server.serve.max_tokens_per_step // 2
    while budget >= SMALLEST_BUDGET and _gaps_limit(found, objective):
        smaller = capacity(replace(server, serve=replace(server.serve, max_tokens_per_step=budget)), objective)
        if smaller.highest.requests_per_s > found.highest.requests_per_s:
            found = smaller
        budget //= 2
    return found


def _gaps_limit(found: Capacity, objective: Objective) -> bool:
    """Whether gaps between tokens hold the rate down, as they are or as they would be in a step full of prompts."""
    server, wanted = found.server, objective.itl_p99_s
    if wanted is None:
        return False
    full_s = server.prefill_s * server.serve.max_tokens_per_step / server.prompt
    return max(found.highest.itl_p99_s, server.decode_s(found.highest.running) + full_s) > 0.9 * wanted


def from_layout(request: Request, layout: Layout) -> Choice:
    """The way a recipe's layout says: tp, pp, ep and precision (serve.dtype goes before it); dp is what the traffic
    needs, not what is given."""
    return choice(request, *_says(request, layout))


def server_of(request: Request, layout: Layout) -> Server:
    """The replica that a recipe's layout says, with its traffic, whether or not it bears that."""
    return _server(request, *_says(request, layout))


def _says(request: Request, layout: Layout) -> tuple[Split, Formats]:
    asked = request.serve.dtype
    precision = resolved_precision(layout) if asked == "auto" else asked
    formats = serving_formats(precision, request.cluster.chip, request.serve.kv_dtype)
    return Split(tp=layout.tp, pp=layout.pp, ep=layout.ep), formats


def choices(request: Request, weights: Sequence[str] = WEIGHTS) -> list[Choice]:
    """Every way that is tried, those that do first, cheapest first; the others with their reason."""
    found = []
    for split, formats in _candidates(request, weights):
        try:
            found.append(choice(request, split, formats))
        except ArmillaryError as error:
            found.append(Choice(split=split, formats=formats, reason=str(error)))
    return sorted(found, key=_rank)


def best(request: Request, weights: Sequence[str] = WEIGHTS) -> Choice:
    """The cheapest way that meets every objective; BadInput with the nearest miss where none does."""
    ranked = choices(request, weights)
    if ranked[0].capacity is None:
        raise BadInput(ranked[0].reason)
    return ranked[0]


def pools(request: Request, choice: Choice) -> Pools:
    """The same cut and formats with prompts and tokens in pools of their own."""
    server = _server(request, choice.split, choice.formats)
    return split_pools(server, server, request.objective)


def price(request: Request, found: Capacity) -> ServingCost | None:
    """Dollars of a deployment; None where no price is known and none was given."""
    try:
        hour: Offer = device_hour(request.cost, request.cluster, found.devices)
    except NoPrice:
        return None
    traffic, actual = request.traffic, found.actual
    busy = actual.prefill_fraction + actual.running / max(1, found.server.most_running) * (1 - actual.prefill_fraction)
    return serving_cost(
        num_devices=found.devices,
        usd_per_device_hour=hour.usd_per_useful_hour,
        tokens_in_per_s=traffic.requests_per_s * traffic.tokens_in,
        tokens_out_per_s=traffic.requests_per_s * traffic.tokens_out,
        prefill_fraction=actual.prefill_fraction,
        busy_fraction=max(busy, actual.prefill_fraction),
    )


# --- candidates


def _candidates(request: Request, weights: Sequence[str]) -> Iterator[tuple[Split, Formats]]:
    """Formats the chip has a use for, on every cut of one fast domain."""
    chip = request.cluster.chip
    for name in weights:
        if name in ("fp8", "fp4") and not chip.peak(name):
            continue  # stored only: int8 and int4 are the same and run everywhere
        for split in _splits(request):
            yield split, serving_formats(name, chip, request.serve.kv_dtype)


def _splits(request: Request) -> Iterator[Split]:
    """tp over the devices that share the fast link, stages beyond that, and for experts attention data-parallel."""
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


def _rank(one: Choice) -> tuple[bool, float, int]:
    dollars = one.cost.million_tokens_usd if one.cost else float(one.devices)
    return one.capacity is None, dollars, one.split.num_devices if one.capacity else -one.split.num_devices


def _server(request: Request, split: Split, formats: Formats) -> Server:
    replica = Replica(
        config=request.config,
        cluster=_home_of(request.cluster, split.num_devices),
        split=split,
        formats=formats,
        rates=request.rates or physics(),
        measured=request.measured,
    )
    return Server(replica=replica, serve=request.serve, traffic=request.traffic)


def _home_of(cluster: Cluster, devices: int) -> Cluster:
    """A cluster that holds one replica: the given one, or as many of its nodes as the replica needs."""
    if devices <= max(1, cluster.num_devices):
        return cluster
    node = cluster.node
    if node is None:
        raise BadInput(
            f"{devices} devices a replica are more than the {cluster.num_devices} of {cluster.name}; "
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
"""what people write -> format of the weights"""


def serving_formats(weights: str, chip: Chip, kv: str = "auto") -> Formats:
    """Integers are weight-only; narrow floats are computed in where the chip can, else stored only. The cache is fp8
    beside fp8 and fp4, unless said otherwise."""
    if weights not in STORED:
        raise unknown("precision", weights, STORED)
    stored = STORED[weights]
    narrow = stored in ("fp8", "fp4")
    compute = stored if stored in ("fp32", "fp16") or (narrow and chip.peak(stored)) else "bf16"
    cache = ("fp8" if narrow else compute) if kv == "auto" else STORED.get(kv, "bf16")
    return Formats(weights=stored, compute=compute, kv=cache)
