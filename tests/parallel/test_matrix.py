"""The whole matrix, and the page that shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from armillary.errors import BadInput
from armillary.training.parity.matrix import Row, cases_of, measure, page, rows_of, table, with_rows
from armillary.training.parity.strategies import ALL, EXPERTS, GPT_OSS, LATENT, chosen, layout_of
from tests.ranks import Ranks

PAGE = Path(__file__).parents[2] / "docs" / "parallel_agreement.md"
WORLDS = (2, 4, 8)
ROWS = [(world, name) for world in WORLDS for name in ALL if layout_of(name, world) is not None]


def _id(world: int, name: str) -> str:
    """'on8-dense-HSDP-x-tp'"""
    plain = re.sub(r"[^0-9a-zA-Z]+", "-", name.replace("×", "x").replace("+", "and")).strip("-")
    return f"on{world}-{plain if name in EXPERTS | LATENT | GPT_OSS else f'dense-{plain}'}"


@pytest.mark.slow
@pytest.mark.parametrize(("world", "strategy"), ROWS, ids=[_id(*row) for row in ROWS])
def test_a_strategy_on_ranks(ranks: Ranks, world: int, strategy: str) -> None:
    """A row each, so that `-k "on8 and dense"` runs a part; dense ones take about ten minutes on two quiet cores, those
    with experts twice as long, and latent and gpt-oss ones as long as both each."""
    row = ranks.run(world, measure, strategy, world, cases_of(strategy, world), timeout_s=1200)[0]
    PAGE.write_text(with_rows(PAGE.read_text() if PAGE.exists() else "", [row]))
    assert not row.over


def row(strategy: str, world: int, value: float, dtypes: tuple[str, ...] = ("fp32", "fp64")) -> Row:
    return Row(strategy, world, 7, {kind: dict.fromkeys(("loss", "norm", "weights"), value) for kind in dtypes})


def test_the_page_shows_the_worst_of_each_and_whether_it_holds() -> None:
    small = {"loss": 1e-8, "norm": 2e-8, "weights": 3e-7}
    made = table([Row("DDP", 2, 8, {"fp32": small, "fp64": dict.fromkeys(small, 1e-15)})])
    assert "| DDP | 2 | 8 | 1.0e-08 | 2.0e-08 | 3.0e-07 | 1.0e-15 | 1.0e-15 | 1.0e-15 | yes | gloo, CPU |" in made
    worse = Row("tp", 4, 3, {"fp32": small | {"loss": float("nan")}})
    assert worse.over == ["loss fp32 nan > 1e-06"]
    assert "| tp | 4 | 3 | nan | 2.0e-08 | 3.0e-07 | – | – | – | no | gloo, CPU |" in table([worse])


def test_a_row_takes_the_place_of_an_earlier_one() -> None:
    made = page([])
    for one in (row("tp", 4, 1e-8), row("DDP", 2, 2e-8), row("tp", 4, 3e-8, ("fp32",))):
        made = with_rows(made, [one])
    assert rows_of(made) == [row("DDP", 2, 2e-8), row("tp", 4, 3e-8, ("fp32",))]


def test_strategies_are_named_as_people_type_them() -> None:
    assert chosen([]) == list(ALL)
    assert chosen(["tp"]) == ["tp"] and chosen(["PPxTP"]) == ["pp × tp"]
    groups = ("dense", "experts", "latent", "gpt-oss", "qwen3-next", "2-simplicial")
    assert {name for group in groups for name in chosen([group])} == set(ALL)
    assert "pp × HSDP" in chosen(["hsdp × tp", "pp"]) and "cp" not in chosen(["pp"])
    with pytest.raises(BadInput, match="no strategy 'zero-4'; did you mean 'ZeRO-"):
        chosen(["zero-4"])
