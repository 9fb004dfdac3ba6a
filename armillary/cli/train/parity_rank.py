"""One rank of `armillary train --parity`: `python -m armillary.cli.train.parity_rank ORDERS`."""

from dataclasses import asdict
from typing import Any

from armillary.cli.output import Output
from armillary.cli.train.parity import layout_in
from armillary.cli.train.rank import run_as_rank


def measure_rows(orders: dict[str, Any], out: Output) -> dict[str, Any]:
    """Every strategy that was asked for, one after the other; the main rank shows how far it is."""
    from armillary.parallel.world import join_world
    from armillary.training.parity.matrix import cases_of, cases_of_layout, measure

    layout, world, formats, rows = layout_in(orders), orders["world"], orders["formats"], []
    with join_world("cpu"), out.progress("parity", total=orders["total"], unit="row") as bar:
        bar.update(orders["done"])
        for name in orders["strategies"]:
            given = (
                cases_of(name, world, formats)
                if layout is None
                else cases_of_layout(layout, formats, experts=orders["experts"])
            )
            rows.append(measure(name, world, given))
            bar.update(1, row=f"{name}: {'does not hold' if rows[-1].over else 'holds'}")
    return {"rows": [asdict(row) for row in rows]}


if __name__ == "__main__":
    run_as_rank(measure_rows)
