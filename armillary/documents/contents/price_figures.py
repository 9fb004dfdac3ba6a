"""Figures of what a device costs: rented, reserved, interruptible and owned, and of the goodput that failures leave.

The formulas are those of planning/cost (cost.py, ownership.py, failures.py); every figure that the planner computes too
is compared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from armillary.documents.figures import Figures
from armillary.planning.cost.cost import (
    RESERVED,
    SPOT_CHECKPOINT_S,
    SPOT_INTERRUPTED_MONTHLY,
    SPOT_RESTART_S,
    Offer,
    device_hour,
    offers,
)
from armillary.planning.cost.failures import per_month
from armillary.planning.cost.ownership import HOURS_A_MONTH, HOURS_A_YEAR, IDLE, NoPrice, Owned, owned
from armillary.spec.hardware import Cluster
from armillary.spec.tables.traffic import Cost

KEYS = {"on demand": "rent", "rented": "rent", "spot": "spot", "owned": "owned"}
"""offer of the planner -> stem of its figures"""
NEWTON = 3
"""steps of Newton's method from Daly's interval to the exact one; goodput is flat there, so two would do"""
CLOUD, OWNED, FAILURES = "Cloud prices", "On-premises", "Failures"


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Which prices are known: keys of figures in `hours`, by offer; `selected` is the one that the recipe asks for."""

    prefix: str
    hours: dict[str, str]
    selected: str
    owned: Owned | None

    def key(self, name: str) -> str:
        return f"{self.prefix}{name}"


def add_prices(figures: Figures, prefix: str, cost: Cost, cluster: Cluster, devices: str, count: int) -> Priced | None:
    """Every offer for `count` devices, whose figure is `devices`; None where no price is known."""
    try:
        known = {offer.name: offer for offer in offers(cost, cluster, count)}
        chosen = device_hour(cost, cluster, count)
    except NoPrice:
        return None
    hours: dict[str, str] = {}
    for name in ("on demand", "rented"):
        if name in known:
            _add_rent(figures, prefix, known, known[name], hours)
    if "spot" in known:
        _add_spot(figures, prefix, known["spot"], cluster, devices, hours)
    device = _owned_or_none(cost, cluster, count)
    if device is not None:
        _add_owned(figures, prefix, cost, device, devices, known["owned"], hours)
        _add_break_even(figures, prefix, cost, device, known, hours)
    selected = hours[chosen.name]
    return Priced(prefix=prefix, hours=hours, selected=selected, owned=device)


def _put(figures: Figures, prefix: str, group: str, key: str, label: str, value: float, unit: str, source: str) -> None:
    """An input; where the plan's other half has the same, it refers to that, so that there is one cell to change."""
    known = figures.rows.get(key) if prefix else None
    money = figures.notation.per_usd if unit.startswith("money") else 1.0
    if known is not None and known.value == float(value) * money:
        figures.derive(group, f"{prefix}{key}", label_of(prefix, label), unit, key)
    else:
        figures.put(group, f"{prefix}{key}", label_of(prefix, label), value, unit, source)


def label_of(prefix: str, label: str) -> str:
    """The label, which says whether it is of serving or of spot machines."""
    return label + (", serving" if "serving_" in prefix else "") + (", spot" if "spot_" in prefix else "")


def _add_rent(figures: Figures, prefix: str, known: dict[str, Offer], rent: Offer, hours: dict[str, str]) -> None:
    key = f"{prefix}rent_hour"
    _put(figures, prefix, CLOUD, "rent_hour", "Device-hour, on demand", rent.usd_per_hour, "money/h", rent.source)
    hours[rent.name] = key
    for years, share in RESERVED.items():
        stem = f"{prefix}reserved_{years}y"
        source = "published three-year prices; one year lies between" if years == 1 else "published three-year prices"
        _put(
            figures,
            prefix,
            CLOUD,
            f"reserved_{years}y_share",
            f"Reserved {years} y, over on demand",
            share,
            "share",
            source,
        )
        label = label_of(prefix, f"Device-hour, reserved {years} y")
        planner = known[f"reserved {years} y"].usd_per_hour
        figures.derive(CLOUD, f"{stem}_hour", label, "money/h", f"{key} * {stem}_share", planner)
        hours[f"reserved {years} y"] = f"{stem}_hour"


def _add_spot(
    figures: Figures, prefix: str, spot: Offer, cluster: Cluster, devices: str, hours: dict[str, str]
) -> None:
    _put(figures, prefix, CLOUD, "spot_hour", "Device-hour, spot", spot.usd_per_hour, "money/h", spot.source)
    chips = cluster.node.num_chips if cluster.node else 1
    _put(figures, prefix, CLOUD, "machine_devices", "Devices per machine", chips, "count", cluster.name)
    machines = f"ceil({devices} / {prefix}machine_devices)"
    figures.derive(CLOUD, f"{prefix}spot_machines", label_of(prefix, "Machines"), "count", machines)
    mtbf_h = 1 / per_month(SPOT_INTERRUPTED_MONTHLY)
    source = f"{SPOT_INTERRUPTED_MONTHLY:.0%} a month, top band of AWS's Spot Instance Advisor".replace("%", " %")
    _put(figures, prefix, CLOUD, "spot_mtbf_h", "Time between interruptions of a spot machine", mtbf_h, "hours", source)
    _put(figures, prefix, CLOUD, "spot_checkpoint_s", "Checkpoint on spot", SPOT_CHECKPOINT_S, "s", "assumed")
    _put(figures, prefix, CLOUD, "spot_restart_s", "Wait for another spot machine", SPOT_RESTART_S, "s", "assumed")
    add_goodput(
        figures,
        f"{prefix}spot_",
        CLOUD,
        f"{prefix}spot_mtbf_h * 3600 / {prefix}spot_machines",
        f"{prefix}spot_checkpoint_s",
        f"{prefix}spot_restart_s",
        spot.useful,
    )
    hours["spot"] = f"{prefix}spot_hour"


def add_goodput(
    figures: Figures, prefix: str, group: str, mtbf: str, checkpoint: str, restart: str, planner: float
) -> None:
    """The best checkpoint interval and its goodput: the formulas of planning/cost/failures.py, with the exact interval
    by Newton's method on −log(1 − x) − x = δ/M, x = τ/M, from Daly's."""
    m, x = f"{prefix}mtbf_all_s", f"{prefix}interval_ratio"
    figures.derive(group, m, label_of(prefix, "Time between failures, all together"), "s", mtbf)
    half = f"({checkpoint} / (2 * {m}))"
    daly = f"(2 * sqrt({half}) * (1 + sqrt({half}) / 3 + {half} / 9) - {checkpoint} / {m})"
    figures.derive(
        group,
        f"{x}_0",
        label_of(prefix, "Interval over time between failures (Daly)"),
        "",
        f"min(0.99, max(1e-9, {daly}))",
    )
    for step in range(NEWTON):
        old = f"{x}_{step}"
        newton = f"{old} - (0 - log(1 - {old}) - {old} - {checkpoint} / {m}) * (1 - {old}) / {old}"
        figures.derive(
            group,
            f"{x}_{step + 1}",
            label_of(prefix, f"Newton's step {step + 1}"),
            "",
            f"min(0.999999, max(1e-9, {newton}))",
        )
    figures.derive(
        group, f"{prefix}interval_s", label_of(prefix, "Best checkpoint interval"), "s", f"max(1, {x}_{NEWTON} * {m})"
    )
    exponent = f"({prefix}interval_s + {checkpoint}) / {m}"
    formula = f"min(1, {prefix}interval_s / ({m} * exp({restart} / {m}) * (exp({exponent}) - 1)))"
    figures.derive(
        group, f"{prefix}goodput", label_of(prefix, "Goodput: share of useful time"), "share", formula, planner
    )


def _owned_or_none(cost: Cost, cluster: Cluster, count: int) -> Owned | None:
    try:
        return owned(cost, cluster, count)
    except NoPrice:
        return None


def _add_owned(
    figures: Figures, prefix: str, cost: Cost, device: Owned, devices: str, offer: Offer, hours: dict[str, str]
) -> None:
    def put(key: str, label: str, value: float, unit: str, source: str) -> None:
        _put(figures, prefix, OWNED, key, label, value, unit, source)

    put("capex", "Purchase per device, with its share of the node", device.capex_usd, "money", device.capex_source)
    put("years", "Depreciation", device.years, "years", "cost.years")
    put("utilisation", "Utilisation of owned devices", cost.utilisation, "share", "cost.utilisation")
    put("power_w", "Power per device, with its share of the node", device.power_w, "W", "hardware catalogue")
    put("idle_power", "Power when idle, over busy", IDLE, "share", "assumed")
    put("pue", "PUE", device.pue, "×", "cost.pue")
    put("kwh", "Electricity per kWh", device.usd_per_kwh, "money/kWh", "cost.usd_per_kwh")
    put("staff", "Staff per year, all devices", cost.staff_usd_per_year, "money", "cost.staff_usd_per_year")
    p = prefix
    use = f"({p}utilisation + {p}idle_power * (1 - {p}utilisation))"
    energy = f"{p}power_w / 1000 * {p}pue * {use} * {HOURS_A_YEAR} * {p}kwh"
    running = device.running_usd_per_year(cost.utilisation)
    label = label_of(prefix, "Electricity and staff per device and year")
    figures.derive(OWNED, f"{p}running_year", label, "money", f"{energy} + {p}staff / {devices}", running)
    hour = f"({p}capex / {p}years + {p}running_year) / ({HOURS_A_YEAR} * {p}utilisation)"
    figures.derive(OWNED, f"{p}owned_hour", label_of(p, "Device-hour, owned"), "money/h", hour, offer.usd_per_hour)
    hours["owned"] = f"{p}owned_hour"


def _add_break_even(
    figures: Figures, prefix: str, cost: Cost, device: Owned, known: dict[str, Offer], hours: dict[str, str]
) -> None:
    rent = known.get("on demand") or known.get("rented")
    if rent is None:
        return
    p, hour = prefix, hours[rent.name]
    saved = f"{hour} * {p}utilisation * {HOURS_A_MONTH} - {p}running_year / 12"
    figures.derive(OWNED, f"{p}saved_month", label_of(p, "Saved per device and month against renting"), "money", saved)
    months, paid = f"where({p}saved_month > 0, {p}capex / max(1e-9, {p}saved_month), 0)", f"{p}paid_back"
    figures.derive(OWNED, paid, label_of(p, "Months until the savings pay the purchase"), "months", months)
    formula = f"where({paid} <= {p}years * 12, {paid}, 0)"
    planner = device.break_even_month(cost.utilisation, rent.usd_per_hour) or 0.0
    figures.derive(
        OWNED, f"{p}break_even", label_of(p, "Break-even of buying against renting"), "months", formula, planner
    )
    more, rest, above, use = (f"{p}{key}" for key in ("busy_year", "idle_year", "saved_year", "even_use"))
    energy = f"{p}power_w / 1000 * {p}pue * (1 - {p}idle_power) * {HOURS_A_YEAR} * {p}kwh"
    idle = f"{p}capex / {p}years + {p}running_year - {more} * {p}utilisation"
    ratio = f"where({above} > 0, {rest} / max(1e-9, {above}), 0)"
    for key, words, unit, formula in (
        (more, "Electricity of a device that is always busy, over one at rest, per year", "money", energy),
        (rest, "An owned device at rest, per year", "money", idle),
        (
            above,
            "Saved by a device that is always busy, per year, before its purchase",
            "money",
            f"{hour} * {HOURS_A_YEAR} - {more}",
        ),
        (use, "Utilisation at which renting and owning cost the same", "never-share", ratio),
    ):
        figures.derive(OWNED, key, label_of(p, words), unit, formula)
    share = device.break_even_utilisation(rent.usd_per_hour) or 0.0
    label = label_of(p, "Utilisation above which owning is cheaper")
    figures.derive(OWNED, f"{p}break_even_use", label, "never-share", f"where({use} <= 1, {use}, 0)", share)
