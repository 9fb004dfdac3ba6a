"""`armillary plan`: predict before anything runs."""

from __future__ import annotations

import click

from armillary.cli.output import Output
from armillary.cli.verb import VerbGroup
from armillary.errors import BadInput
from armillary.profiling.amdahl import amdahl as amdahl_rows
from armillary.profiling.amdahl import speedup
from armillary.store.home import Home

plan = VerbGroup("plan", help="Predict before anything runs.")


@plan.verb
@click.argument("parts", nargs=-1, required=True, metavar="PART=SHARE...")
@click.option("--speedup", "factor", default=2.0, show_default=True, help="How many times as fast a part becomes.")
def amdahl(out: Output, home: Home, parts: tuple[str, ...], factor: float) -> None:
    """What speeding up a part of the time buys for the whole.

    PART=SHARE is a class of work and its share of the time: gemm=0.8, or gemm=80%.
    """
    shares = dict(_share(part) for part in parts)
    rows = [(row, speedup(row.share, factor)) for row in amdahl_rows(shares)]
    cells = [[row.work, f"{row.share * 100:.4g} %", f"{buys:.2f} ×", f"{row.ceiling:.2f} ×"] for row, buys in rows]
    out.table("", ["part", "share", f"{factor:g} × faster buys", "at most"], cells)
    answer = [{"part": row.work, "share": row.share, "speedup": buys, "ceiling": row.ceiling} for row, buys in rows]
    out.result(answer, quiet=[f"{buys:.4g}" for _, buys in rows])


def _share(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        raise BadInput(f"'{text}' is not PART=SHARE; write it like gemm=0.8") from None
    return name, share
