"""Cost, goodput and storage of a plan as text."""

from armillary.planning.cost.cost import Offer, TrainingCost, offers
from armillary.planning.cost.failures import Goodput
from armillary.planning.cost.ownership import NoPrice, owned
from armillary.planning.cost.storage import RunStorage, fits
from armillary.spec.hardware import Cluster
from armillary.spec.tables.traffic import Cost
from armillary.units import bandwidth_text, bytes_text, dollars_text, seconds_text

OFFER_COLUMNS = ("offer", "$/h", "kept", "$/useful h", "source")
STORAGE_COLUMNS = ("what", "size", "kept", "read", "write", "slowest tier that does")


def offer_cells(offer: Offer) -> list[str]:
    """One row of the table of offers."""
    return [
        offer.name,
        dollars_text(offer.usd_per_hour),
        f"{offer.useful * 100:.0f} %",
        dollars_text(offer.usd_per_useful_hour),
        offer.source,
    ]


def training_rows(cost: TrainingCost) -> list[tuple[str, str]]:
    """(label, text) of the cost of a run."""
    return [
        (
            "cost",
            f"{dollars_text(cost.run_usd)} for the run, {dollars_text(cost.step_usd)} per step, "
            f"{dollars_text(cost.million_trained_tokens_usd)} per million tokens, "
            f"at {dollars_text(cost.device_hour_usd)} per device-hour",
        ),
        ("run", f"{seconds_text(cost.run_s)} for {cost.steps:,} steps, time lost to failures included"),
    ]


def buying_rows(cost: Cost, cluster: Cluster) -> list[tuple[str, str]]:
    """(label, text) of owning against renting; the reason where a price is unknown."""
    try:
        device = owned(cost, cluster)
        rent = next((offer for offer in offers(cost, cluster) if offer.name in ("on demand", "rented")), None)
    except NoPrice as error:
        return [("own or rent", str(error))]
    if rent is None:
        return [("own or rent", "no rent is known; try --set cost.usd_per_device_hour=2.5")]
    month = device.break_even_month(cost.utilisation, rent.usd_per_hour)
    use = device.break_even_utilisation(rent.usd_per_hour)
    pays = f"pays off after {month:.0f} months" if month is not None else f"does not pay off in {cost.years:g} years"
    above = f"cheaper than rent above {use * 100:.0f} % use" if use is not None else "never cheaper than rent"
    return [
        (
            "owned",
            f"{dollars_text(device.usd_per_hour(cost.utilisation))} per device-hour at {cost.utilisation * 100:.0f} % "
            f"use: {dollars_text(device.capex_usd)} over {device.years:g} years ({device.capex_source}), "
            f"{device.power_w:,.0f} W",
        ),
        ("own or rent", f"buying {pays} against {dollars_text(rent.usd_per_hour)} {rent.name}; {above}"),
    ]


def goodput_rows(goodput: Goodput) -> list[tuple[str, str]]:
    """(label, text) of failures and goodput."""
    lost, failures = goodput.lost(), goodput.failures
    return [
        (
            "failures",
            f"one every {seconds_text(failures.mtbf_s)} on {failures.num_devices:,} devices "
            f"({goodput.interruptions_per_day:.2g} per day)",
        ),
        (
            "goodput",
            f"{goodput.goodput_fraction * 100:.1f} %: lost {lost['checkpoints'] * 100:.1f} % to checkpoints, "
            f"{lost['repeated'] * 100:.1f} % to repeated steps, {lost['restarts'] * 100:.1f} % to restarts",
        ),
        (
            "checkpoint every",
            f"{seconds_text(goodput.interval_s)} (Young {seconds_text(goodput.young_s)}, "
            f"Daly {seconds_text(goodput.daly_s)}), each stops training for {seconds_text(failures.checkpoint_s)}",
        ),
    ]


def storage_cells(storage: RunStorage, cluster: Cluster) -> list[list[str]]:
    """Rows of the table of storage needs, with the slowest tier that is fast enough."""
    rows = []
    for need in storage.needs:
        first = fits(need, cluster)[0]
        tier = first.tier.title if first.holds else f"none: {first.tier.title} is {first.short:.1f} × short"
        rows.append(
            [
                need.name,
                bytes_text(need.size_bytes),
                bytes_text(need.kept_bytes),
                bandwidth_text(need.read_bytes_per_s),
                bandwidth_text(need.write_bytes_per_s),
                tier,
            ]
        )
    return rows
