"""Rule on speculation: drafts that are rejected so often that plain decoding would be faster."""

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever
from armillary.diagnosis.evidence.thresholds import MIN_DRAFTED, SPECULATION_LOSS_SHARE
from armillary.diagnosis.readings.reading import Reading
from armillary.spec.plan import Plan


def rejected_drafts(reading: Reading, plan: Plan | None) -> Finding | None:
    """Verifying drafts takes longer than the tokens that they save, by the engine's own account of plain steps."""
    speedup, drafted, accepted = (
        _last(reading, name) for name in ("speculation_speedup", "drafted_total", "accepted_total")
    )
    if not speedup or (drafted or 0.0) < MIN_DRAFTED or 1 - speedup < SPECULATION_LOSS_SHARE:
        return None
    share, acceptance = 1 - speedup, (accepted or 0.0) / (drafted or 1.0)
    lever = Lever(
        title="decode without drafts",
        change={"serve.speculate": "none"},
        speedup=1 / speedup,
        of="tokens_out_per_s",
        basis="plain decode steps of this server",
    )
    return Finding(
        loop="product",
        cause="rejected_drafts",
        rule="rejected_drafts",
        share=share,
        evidence=(
            Evidence(gauge="speculation_speedup", value=speedup, expected=1.0, against="plain decoding"),
            Evidence(gauge="acceptance_fraction", value=acceptance),
        ),
        levers=(lever,),
        says=f"{acceptance:.0%} of {drafted:,.0f} draft tokens are accepted, and decoding with them takes "
        f"{1 / speedup:.2f} times as long as without",
    )


def _last(reading: Reading, gauge: str) -> float | None:
    """Of a figure that counts from the start of the server."""
    values = reading.series(gauge)
    return values[-1] if values else reading.get(gauge)
