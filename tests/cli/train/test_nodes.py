"""`--nodes`: what may be asked for, and how ranks are shared out."""

import pytest

from armillary.cli.train.leader import rows_text, share_out
from armillary.cli.train.nodes import parse_nodes
from armillary.errors import BadInput
from armillary.spec.layout import Layout
from armillary.training.resilience.node_rendezvous import Nodes


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("3:4", Nodes(least=3, most=4)),
        ("8", Nodes(least=8, most=8)),
        ("2:8@node0", Nodes(least=2, most=8, host="node0")),
        ("1:2@10.0.0.1:29500", Nodes(least=1, most=2, host="10.0.0.1", port=29_500)),
    ],
)
def test_nodes_are_a_range_and_a_place(text: str, nodes: Nodes) -> None:
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "four", "4:", ":4", "2:4@", "2:4@host:port"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(BadInput, match=r"is no number of nodes; try --nodes 2:4, or --nodes 2:4@HOST:PORT"):
        parse_nodes(text)


@pytest.mark.parametrize("text", ["0:4", "4:3"])
def test_an_empty_range(text: str) -> None:
    with pytest.raises(BadInput, match="has no number between its ends"):
        parse_nodes(text)


def nodes(*devices: int) -> list[dict[str, int]]:
    return [{"devices": count} for count in devices]


def test_ranks_fill_nodes_in_order() -> None:
    assert share_out(nodes(4, 4, 4), 12) == [4, 4, 4]
    assert share_out(nodes(4, 4, 4), 8) == [4, 4, 0]  # tp × pp = 8: the third waits
    assert share_out(nodes(1, 2, 4), 5) == [1, 2, 2]


def test_rows_are_shared_out_as_evenly_as_possible() -> None:
    assert rows_text(Layout(dp=4), 8) == "2 rows of the batch of 8 each"
    assert rows_text(Layout(dp=3, uneven=True), 8) == "2 or 3 rows of the batch of 8 each"
