"""Cost per device-hour (on demand, reserved, spot or owned), per step and per token.

    step           devices · $/h · step / 3600 / goodput
    run            steps · step
    million tokens trained   run / tokens · 10⁶
    million tokens served    devices · $/h / 3600 / (tokens/s) · 10⁶; prompts and completions by the time they take

A spot hour costs more than its price: interruptions lose work and time, so the price is divided by the goodput that
failures.py expects at the rate of interruption.
"""

from dataclasses import dataclass
from math import ceil, isfinite
from statistics import median

from armillary.errors import BadInput, NotFound, nearest
from armillary.planning.cost.failures import HOUR, Failures, expected_goodput, per_month
from armillary.planning.cost.ownership import NoPrice, Owned, owned
from armillary.spec import catalogue
from armillary.spec.hardware import Chip, Cluster, Price
from armillary.spec.tables.traffic import Cost

RESERVED = {1: 0.62, 3: 0.40}
"""price of a reserved hour over one on demand, by years of commitment: trn1.32xlarge 8.197 of 21.50 and inf2.48xlarge
5.608 of 12.98 $/h for three years (aws-neuron-sdk price tables); one year lies between that and the full price"""
SPOT_INTERRUPTED_MONTHLY = 0.2
"""probability that a spot machine is interrupted within a month: where the top band of AWS's Spot Instance Advisor
begins"""
SPOT_CHECKPOINT_S, SPOT_RESTART_S = 30.0, 900.0
"""seconds for a checkpoint, and for waiting for another machine"""
_LEAST_USEFUL = 0.01
"""share of useful time below which spot machines are no offer: some ten thousand are interrupted every few minutes"""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One way to have a device for an hour."""

    name: str
    """on demand, reserved 1 y, reserved 3 y, spot, owned"""
    usd_per_hour: float
    useful: float = 1.0
    """share of the hour that is not lost to interruptions of spot machines"""
    source: str = ""

    @property
    def usd_per_useful_hour(self) -> float:
        return self.usd_per_hour / self.useful if self.useful > 0 else float("inf")


# --- an hour of one device


def device_hour(cost: Cost, cluster: Cluster, num_devices: int | None = None) -> Offer:
    """The offer that the cost table selects: owned, spot or on demand."""
    devices = num_devices or cluster.num_devices
    if cost.owned:
        return _owned_offer(cost, cluster, devices)
    rented = cost.usd_per_device_hour is not None or not cost.spot
    return _rented(cost, cluster, devices) if rented else _spot(cost, cluster, devices)


def offers(cost: Cost, cluster: Cluster, num_devices: int | None = None) -> list[Offer]:
    """Every offer with a known price, cheapest useful hour first."""
    devices, offers = num_devices or cluster.num_devices, []
    for make in (_rented, _spot, _owned_offer):
        try:
            offers.append(make(cost, cluster, devices))
        except NoPrice:
            continue  # of that kind
    full = next((offer for offer in offers if offer.name in ("on demand", "rented")), None)
    if full is not None:
        offers += [
            Offer(
                name=f"reserved {years} y", usd_per_hour=full.usd_per_hour * share, source=f"{share:.0%} of {full.name}"
            )
            for years, share in RESERVED.items()
        ]
    if not offers:
        raise NoPrice(f"no price of {cluster.chip.title} is known; try --set cost.usd_per_device_hour=2.5")
    return sorted(offers, key=lambda offer: offer.usd_per_useful_hour)


def _rented(cost: Cost, cluster: Cluster, devices: int) -> Offer:
    if cost.usd_per_device_hour is not None:
        return Offer(name="rented", usd_per_hour=cost.usd_per_device_hour, source="cost.usd_per_device_hour")
    rows = _prices(cluster.chip, cost.provider)
    return Offer(name="on demand", usd_per_hour=median(row.usd_per_hour for row in rows), source=_source(rows))


def _spot(cost: Cost, cluster: Cluster, devices: int) -> Offer:
    chip = cluster.chip
    rows = [row for row in _prices(chip, cost.provider) if row.spot_usd_per_hour is not None]
    if not rows:
        where = f" at {cost.provider}" if cost.provider else ""
        raise NoPrice(f"no spot price of {chip.title}{where} is known; try --set cost.spot=false")
    price = median(row.spot_usd_per_hour for row in rows if row.spot_usd_per_hour is not None)
    machines = ceil(devices / cluster.node.num_chips) if cluster.node else devices
    useful = spot_goodput(machines)
    if useful < _LEAST_USEFUL:
        raise NoPrice(f"{machines:,} spot machines are interrupted all the time; try --set cost.spot=false")
    return Offer(name="spot", usd_per_hour=price, useful=useful, source=_source(rows))


def spot_goodput(machines: int, monthly: float = SPOT_INTERRUPTED_MONTHLY) -> float:
    """Share of useful time on spot `machines`, each interrupted within a month with probability `monthly`."""
    rate = per_month(monthly)
    if rate == 0:
        return 1.0
    case = Failures(
        num_devices=machines, device_mtbf_s=HOUR / rate, checkpoint_s=SPOT_CHECKPOINT_S, restart_s=SPOT_RESTART_S
    )
    return expected_goodput(case).goodput_fraction


def _owned_offer(cost: Cost, cluster: Cluster, devices: int) -> Offer:
    device: Owned = owned(cost, cluster, devices)
    return Offer(name="owned", usd_per_hour=device.usd_per_hour(cost.utilisation), source=device.capex_source)


def _prices(chip: Chip, provider: str) -> list[Price]:
    rows = list(catalogue.prices(chip.name))
    if provider:
        known = sorted({row.provider for row in rows})
        rows = [row for row in rows if row.provider == provider.strip().lower()]
        if not rows and known:
            guess = nearest(provider, known)
            hint = f"did you mean {guess}?" if guess else f"one of: {', '.join(known)}"
            raise NotFound(f"'{provider}' offers no {chip.title}; {hint}")
    if not rows:
        raise NoPrice(f"no hourly price of {chip.title} is known; try --set cost.usd_per_device_hour=2.5")
    return rows


def _source(rows: list[Price]) -> str:
    provider = rows[0].provider if len(rows) == 1 else f"median of {len(rows)} providers"
    return f"{provider}, {rows[0].date}"


# --- steps and tokens


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """Cost of training in dollars, time lost to failures included."""

    step_usd: float
    run_usd: float
    million_trained_tokens_usd: float
    run_s: float
    steps: int
    device_hour_usd: float


def training_cost(
    *, step_s: float, batch_tokens: int, steps: int, num_devices: int, usd_per_device_hour: float, goodput: float = 1.0
) -> TrainingCost:
    """Dollars and wall time of a run of `steps`, with a share `goodput` of useful time."""
    _check(step_s=step_s, batch_tokens=batch_tokens, steps=steps, num_devices=num_devices, goodput=goodput)
    if not (isfinite(usd_per_device_hour) and usd_per_device_hour >= 0):
        raise BadInput(f"a price of {usd_per_device_hour} $/h is not a price; give 0 or more")
    wall = step_s / min(1.0, goodput)
    step_usd = num_devices * usd_per_device_hour * wall / HOUR
    return TrainingCost(
        step_usd=step_usd,
        run_usd=step_usd * steps,
        run_s=wall * steps,
        steps=steps,
        million_trained_tokens_usd=step_usd / batch_tokens * 1e6,
        device_hour_usd=usd_per_device_hour,
    )


@dataclass(frozen=True, kw_only=True)
class ServingCost:
    """Cost of serving in dollars: prompts and completions divide it by the time they take; a month is 730 hours of all
    devices."""

    million_tokens_usd: float
    million_in_usd: float
    million_out_usd: float
    device_hour_usd: float
    month_usd: float

    def predicted(self) -> dict[str, float]:
        return {"million_tokens_usd": self.million_tokens_usd, "device_hour_usd": self.device_hour_usd}


def serving_cost(
    *,
    num_devices: int,
    usd_per_device_hour: float,
    tokens_in_per_s: float,
    tokens_out_per_s: float,
    prefill_fraction: float = 0.5,
    busy_fraction: float = 1.0,
) -> ServingCost:
    """Dollars per million tokens of devices that are paid for whether busy or not. Prefill takes `prefill_fraction` of
    the busy time, which divides the cost between prompts and completions."""
    _check(num_devices=num_devices, tokens_in_per_s=tokens_in_per_s, tokens_out_per_s=tokens_out_per_s)
    if not (isfinite(usd_per_device_hour) and usd_per_device_hour >= 0):
        raise BadInput(f"a price of {usd_per_device_hour} $/h is not a price; give 0 or more")
    second = num_devices * usd_per_device_hour / HOUR
    share = min(1.0, max(0.0, prefill_fraction / busy_fraction if busy_fraction else 0.0))
    return ServingCost(
        million_tokens_usd=second / (tokens_in_per_s + tokens_out_per_s) * 1e6,
        million_in_usd=second * share / tokens_in_per_s * 1e6,
        million_out_usd=second * (1 - share) / tokens_out_per_s * 1e6,
        device_hour_usd=usd_per_device_hour,
        month_usd=second * HOUR * 730,
    )


def _check(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise BadInput(f"{name}={value} must be above 0; nothing costs nothing")
