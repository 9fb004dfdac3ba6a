"""Sections for finance: cost model (cloud and on-premises), and sensitivity to its inputs."""

from __future__ import annotations

from armillary.documents.blocks import Block, Cell, Chart, Paragraph, Section, Table
from armillary.documents.contents.price_figures import Priced
from armillary.documents.facts import PlanFacts
from armillary.documents.figures import Amount, Figures
from armillary.planning.cost.ownership import HOURS_A_MONTH

TOTALS = "Totals"
SWING = 0.2
"""relative change of each input in the sensitivity table"""
EVERY_MONTHS = 6


def add_totals(figures: Figures, facts: PlanFacts) -> None:
    """What the first year costs: the run, its storage, and twelve months of serving."""
    parts = []
    if "run_cost" in figures:
        parts.append("run_cost")
    if "storage_month" in figures:
        figures.derive(
            TOTALS, "storage_run", "Storage during the run", "money", "storage_month * max(1, run_days / 30.4)"
        )
        parts.append("storage_run")
    if "serving_month" in figures:
        figures.derive(TOTALS, "serving_year", "Serving, twelve months", "money", "serving_month * 12")
        parts.append("serving_year")
    if not parts:
        return
    figures.derive(TOTALS, "plan_cost", "First year, all together", "money", " + ".join(parts))
    if facts.options.budget_usd is not None:
        figures.put(TOTALS, "budget", "Budget", facts.options.budget_usd, "money", "report.budget_usd")
        figures.derive(TOTALS, "budget_left", "Left of the budget", "money", "budget - plan_cost")


def cost_section(facts: PlanFacts, figures: Figures, trained: Priced | None, served: Priced | None) -> Section:
    if trained is None and served is None:
        why = facts.training.price_source if facts.training else "no price is known; set cost.usd_per_device_hour"
        text = f"No cost can be stated: {why}."
        return Section(key="cost", title="Cost model", blocks=[Paragraph(text=text)], points=[text])
    text = _cost_text(figures)
    blocks: list[Block] = [Paragraph(text=text), _totals_table(figures)]
    points = [text]
    if trained is not None:
        blocks += [_offers_table(figures, trained), _offers_chart(figures, trained)]
    if served is not None:
        blocks.append(_serving_table(figures, served))
        if f"{served.prefix}capex" in figures:
            blocks += [Paragraph(text=_years_text(figures, served)), _years_table(figures, served)]
    priced = trained or served
    if priced is not None and f"{priced.prefix}break_even" in figures:
        own = _own_text(figures, priced)
        points.append(own)
        blocks += [Paragraph(text=own), _ownership_table(figures, priced), _ownership_chart(figures, priced)]
    return Section(key="cost", title="Cost model", blocks=blocks, points=points)


def _cost_text(figures: Figures) -> str:
    parts = []
    if "run_cost" in figures:
        parts.append(
            figures.say(
                "The training run takes {device_hours} of devices at {device_hour} each: {run_cost}, or {trained_cost} "
                "trained tokens."
            )
        )
    if "serving_month" in figures:
        parts.append(
            figures.say(
                "Serving costs {serving_month} a month, {served_cost} served tokens, at {serving_hour} and device."
            )
        )
    parts.append(figures.say("The first year comes to {plan_cost}."))
    if "budget" in figures:
        left = figures["budget_left"].value
        over = (
            "That is {budget_left} below the budget of {budget}."
            if left >= 0
            else "That exceeds the budget of {budget}."
        )
        parts.append(figures.say(over))
    return " ".join(parts)


def _totals_table(figures: Figures) -> Table:
    keys = [key for key in ("run_cost", "storage_run", "serving_year", "plan_cost") if key in figures]
    rows: list[list[Cell]] = [[figures[key].label, figures.amount(key)] for key in keys]
    return Table(caption="Cost of the first year", columns=("item", "amount"), rows=rows, total=True)


def _offers_table(figures: Figures, priced: Priced) -> Table:
    rows: list[list[Cell]] = []
    for name, key in priced.hours.items():
        useful = "spot_goodput" if name == "spot" else "1"
        run = f"devices * (step_s * steps / min(1, goodput * {useful})) / 3600 * {key}"
        selected = "selected" if key == priced.selected else ""
        share = figures.calculated(useful, "share")
        rows.append([name, figures.amount(key), share, figures.calculated(run, "money"), selected])
    columns = ("offer", "device-hour", "useful time", "training run", "")
    return Table(caption="Training by offer, cloud and on-premises", columns=columns, rows=rows)


def _offers_chart(figures: Figures, priced: Priced) -> Chart:
    rows = _offers_table(figures, priced).rows
    amounts = [row[3] for row in rows if isinstance(row[3], Amount)]
    return Chart(
        caption="Cost of the training run by offer",
        kind="bar",
        categories=[str(row[0]) for row in rows],
        series=[("training run", amounts)],
    )


def _serving_table(figures: Figures, priced: Priced) -> Table:
    rows: list[list[Cell]] = []
    for name, key in priced.hours.items():
        useful = " / serving_spot_goodput" if name == "spot" else ""
        month = f"serving_devices * {key}{useful} * {HOURS_A_MONTH}"
        token = f"serving_devices * {key}{useful} / 3600 / served_per_s * 1000000"
        selected = "selected" if key == priced.selected else ""
        cells = (figures.calculated(month, "money"), figures.calculated(token, "money/M"))
        rows.append([name, figures.amount(key), *cells, selected])
    columns = ("offer", "device-hour", "per month", "per million tokens", "")
    return Table(caption="Serving by offer, cloud and on-premises", columns=columns, rows=rows)


def _years(figures: Figures, served: Priced, offer: str) -> tuple[Amount, Amount, Amount]:
    """Devices of the service by one offer: at the beginning, per year, and over the years of depreciation."""
    p, devices = served.prefix, "serving_devices"
    key, useful = served.hours[offer], " / serving_spot_goodput" if offer == "spot" else ""
    first, year = "0", f"{devices} * {key}{useful} * {12 * HOURS_A_MONTH}"
    if offer == "owned":
        first, year = f"{devices} * {p}capex", f"{devices} * {p}running_year"
    total = f"{first} + {year} * {p}years"
    return figures.calculated(first, "money"), figures.calculated(year, "money"), figures.calculated(total, "money")


def _years_text(figures: Figures, served: Priced) -> str:
    p, selected = served.prefix, next(name for name, key in served.hours.items() if key == served.selected)
    money = {name: _years(figures, served, name)[2].value for name in {selected, "owned"}}
    return figures.say(
        "Over the {years} of depreciation the devices of the service cost {selected} ({offer}) or {owned} bought, "
        "electricity and staff included. The price of an owned device-hour above spreads this over the {use} of the "
        "hours in which a device is used.",
        years=figures.text(f"{p}years"),
        selected=figures.notation.text(money[selected], "money", short=True),
        offer=selected,
        owned=figures.notation.text(money["owned"], "money", short=True),
        use=figures.text(f"{p}utilisation"),
    )


def _years_table(figures: Figures, served: Priced) -> Table:
    rows: list[list[Cell]] = [[name, *_years(figures, served, name)] for name in served.hours]
    columns = ("offer", "at the beginning", "per year", "over the years of depreciation")
    return Table(caption="Total cost of ownership of the service", columns=columns, rows=rows)


def _own_text(figures: Figures, priced: Priced) -> str:
    p = priced.prefix
    month, use = figures[f"{p}break_even"].value, figures[f"{p}break_even_use"].value
    pays = f"pays off after {month:.1f} months" if month else "does not pay off within its depreciation"
    above = f"owning is cheaper above {use * 100:.0f} % use" if use else "renting is cheaper at any use"
    return figures.say(
        "Bought, a device-hour costs {hour} at {use} use, over {years}; against renting on demand that {pays}, and "
        "{above}.",
        hour=figures.text(f"{p}owned_hour", short=False),
        use=figures.text(f"{p}utilisation"),
        years=figures.text(f"{p}years"),
        pays=pays,
        above=above,
    )


def _months(figures: Figures, priced: Priced) -> list[int]:
    years = figures[f"{priced.prefix}years"].value
    return list(range(0, max(EVERY_MONTHS, round(years * 12)) + 1, EVERY_MONTHS))


def _ownership(figures: Figures, priced: Priced, month: int) -> tuple[Amount, Amount]:
    """Costs of one device until a month: rented for its hours in use, and owned."""
    p = priced.prefix
    rent = priced.hours.get("on demand") or priced.hours["rented"]
    rented = figures.calculated(f"{rent} * {p}utilisation * {HOURS_A_MONTH} * {month}", "money")
    return rented, figures.calculated(f"{p}capex + {p}running_year / 12 * {month}", "money")


def _ownership_table(figures: Figures, priced: Priced) -> Table:
    rows: list[list[Cell]] = [[f"{month}", *_ownership(figures, priced, month)] for month in _months(figures, priced)]
    columns = ("month", "rented", "owned")
    return Table(caption="Cumulative cost of one device, rented and owned", columns=columns, rows=rows)


def _ownership_chart(figures: Figures, priced: Priced) -> Chart:
    months = _months(figures, priced)
    months_costs = [_ownership(figures, priced, month) for month in months]
    return Chart(
        caption="Renting against owning, one device",
        kind="line",
        categories=[str(month) for month in months],
        series=[("rented", [rented for rented, _ in months_costs]), ("owned", [own for _, own in months_costs])],
        x_name="months",
    )


# --- sensitivity


def sensitivity_section(figures: Figures, trained: Priced | None, served: Priced | None) -> Section | None:
    """The first year's cost with each input a fifth lower and higher."""
    if "plan_cost" not in figures:
        return None
    inputs = [key for key in _inputs(figures, trained, served) if key in figures and not figures[key].formula]
    swings = [_swing(figures, key) for key in inputs]
    swings = [row for row in swings if abs(row[2].value - row[1].value) > 1e-9 * abs(figures["plan_cost"].value)]
    swings.sort(key=lambda row: -abs(row[2].value - row[1].value))
    if not swings:
        return None
    rows: list[list[Cell]] = [
        [figures[key].label, figures.amount(key), low, high, _span(figures, low, high)] for key, low, high in swings
    ]
    first = figures[swings[0][0]].label
    change = abs(swings[0][2].value - swings[0][1].value) / 2
    text = figures.say(
        "The first year costs {plan_cost}. It depends most on “{first}”: a change of {swing} moves the total by about "
        "{change}.",
        first=first,
        swing=f"{SWING * 100:.0f} %",
        change=figures.notation.text(change, "money", short=True),
    )
    lower, higher = f"{SWING * 100:.0f} % lower", f"{SWING * 100:.0f} % higher"
    table = Table(
        caption="Sensitivity of the first year’s cost", columns=("input", "now", lower, higher, "span"), rows=rows
    )
    shown = swings[:8]
    chart = Chart(
        caption="First year’s cost with each input a fifth lower and higher",
        kind="bar",
        categories=[figures[key].label for key, _, _ in shown],
        series=[(lower, [row[1] for row in shown]), (higher, [row[2] for row in shown])],
    )
    return Section(key="sensitivity", title="Sensitivity", blocks=[Paragraph(text=text), table, chart], points=[text])


def _swing(figures: Figures, key: str) -> tuple[str, Amount, Amount]:
    """(input, the first year's cost with it lower, and higher)."""
    low, high = (figures.scaled("plan_cost", key, 1 + sign * SWING) for sign in (-1, 1))
    return key, low, high


def _inputs(figures: Figures, trained: Priced | None, served: Priced | None) -> list[str]:
    keys = ["device_tokens_per_s", "steps", "batch_tokens", "requests_per_s", "replica_rate", "gb_month"]
    for priced in (trained, served):
        if priced is not None:
            names = ("rent_hour", "spot_hour", "capex", "years", "utilisation", "kwh", "pue", "staff")
            keys += [priced.key(name) for name in names]
    return list(dict.fromkeys(keys))


def _span(figures: Figures, low: Amount, high: Amount) -> Amount:
    formula = f"max({low.formula}, {high.formula}) - min({low.formula}, {high.formula})"
    return Amount(value=abs(high.value - low.value), unit="money", formula=formula)
