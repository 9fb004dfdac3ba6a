"""A prefill and a decode server of several gloo ranks each give the tokens of one engine on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from armillary.engine.cache.layer_groups import Group
from armillary.engine.disaggregation.decode_rank import Source
from armillary.engine.disaggregation.head_slices import divides, head_slices, own_heads
from armillary.engine.disaggregation.prefill_connection import PrefillConnection
from armillary.engine.disaggregation.roles import follower
from armillary.engine.disaggregation.shared_memory import SharedFrames
from armillary.engine.disaggregation.stage_slots import stage_slots
from armillary.engine.llm import LLM
from armillary.errors import BadInput
from armillary.parallel.world import World, join_world
from tests.engine.disaggregation.test_disaggregation import (
    MODELS,
    PROMPTS,
    SERVE,
    Expected,
    Folders,
    Side,
    expected,  # noqa: F401
    folders,  # noqa: F401
    free_address,
    until,
)
from tests.ranks import Ranks

Answer = tuple[list[list[int]], dict[str, float]]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Ranks of the prefill server."""
    with Ranks(tmp_path_factory.mktemp("prefill")) as pool:
        yield pool


def part(role: str, where: str, address: str, over: str, fault: str, stages: int = 1) -> Any:
    """On every rank of a server, until the decode server has its tokens."""
    serve = replace(SERVE, role=role, prefill=address, pp=stages if role == "prefill" else 1)
    with join_world("cpu") as world:
        if fault == "sent":
            SharedFrames.opened = classmethod(lambda cls, offer: None)  # type: ignore
        return follow(Path(where), serve, world, fault) if world.rank else lead(Path(where), serve, world, Path(over))


def follow(folder: Path, serve: Any, world: World, fault: str) -> int:
    llm = LLM(folder, serve, device="cpu", world=world)
    assert llm.ranks is not None
    obeys, given = follower(llm.engine, serve, llm.ranks.world), Source.next
    if fault == "lost":
        Source.next = lambda source: None  # type: ignore
    try:
        return llm.follow(obeys)
    finally:
        Source.next = given  # type: ignore
        obeys.close()


def lead(folder: Path, serve: Any, world: World, over: Path) -> Answer | None:
    side = Side(folder, serve, world)
    try:
        if serve.role == "prefill":
            until(over.exists, 60.0)
            side.checked()
            return None
        until(lambda: side.gauge("prefill_connected") == 1, 60.0)  # whose ranks may start later
        found = side.tokens(PROMPTS)
        side.checked()
        return found, side.part.gauges()
    finally:
        side.close()
        over.touch()


def served(
    ranks: Ranks, others: Ranks, folder: Path, tmp_path: Path, sizes: tuple[int, int], fault: str = "", stages: int = 1
) -> Answer:
    """What a prefill server, with so many stages, and a decode server of these sizes answer."""
    given = str(folder), free_address(sizes[0]), str(tmp_path / f"over-{time.monotonic_ns()}"), fault, stages
    with ThreadPoolExecutor(1) as thread:
        prefill = thread.submit(others.run, sizes[0], part, "prefill", *given)
        answer: Answer = ranks.run(sizes[1], part, "decode", *given)[0]
        prefill.result()
    return answer


CASES = [((1, 2), ["dense"]), ((2, 1), ["windows", "latents"]), ((2, 2), ["dense"])]
REST = [(sizes, [name for name in MODELS if name not in names]) for sizes, names in CASES]
REST += [(sizes, list(MODELS)) for sizes in ((1, 4), (4, 1), (2, 4), (4, 2), (4, 4))]


@pytest.mark.parametrize(
    ("sizes", "names"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)], ids=str
)
def test_any_ranks_on_either_side(
    sizes: tuple[int, int],
    names: list[str],
    ranks: Ranks,
    others: Ranks,
    folders: Folders,  # noqa: F811
    expected: Expected,  # noqa: F811
    tmp_path: Path,
) -> None:
    for name in names:
        tokens, gauges = served(ranks, others, folders[name], tmp_path, sizes)
        assert tokens == expected[name], name
        assert gauges["kv_fetched_total"] >= 4 and not gauges["kv_fetch_failed_total"], name


@pytest.mark.parametrize(
    ("sizes", "stages", "names"),
    [
        ((2, 1), 2, ["windows", "latents"]),
        pytest.param((2, 1), 2, ["dense", "experts"], marks=pytest.mark.slow),
        pytest.param((4, 2), 2, list(MODELS), marks=pytest.mark.slow),
        pytest.param((4, 1), 4, ["dense", "windows"], marks=pytest.mark.slow),
        pytest.param((4, 4), 2, ["four KV heads"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_come_from_every_stage(
    sizes: tuple[int, int],
    stages: int,
    names: list[str],
    ranks: Ranks,
    others: Ranks,
    folders: Folders,  # noqa: F811
    expected: Expected,  # noqa: F811
    tmp_path: Path,
) -> None:
    for name in names:
        tokens, gauges = served(ranks, others, folders[name], tmp_path, sizes, stages=stages)
        assert tokens == expected[name], name
        assert gauges["kv_fetched_total"] >= 4 and not gauges["kv_fetch_failed_total"], name


def test_places_of_a_stages_layers_in_a_block() -> None:
    groups = (Group(layers=(0, 2, 4)), Group(sees="window", reach=4, layers=(1, 3, 5)))
    first, second = stage_slots(groups, 2)
    assert first.by_group == (range(0, 2), range(0, 1)) and first.num_slots == 2
    assert second.by_group == (range(2, 3), range(1, 3)) and second.num_slots == 2
    assert stage_slots(groups, 1)[0].by_group == (range(0, 3), range(0, 3))


def test_heads_over_connections_alone(
    ranks: Ranks,
    others: Ranks,
    folders: Folders,  # noqa: F811
    expected: Expected,  # noqa: F811
    tmp_path: Path,
) -> None:
    tokens, gauges = served(ranks, others, folders["dense"], tmp_path, (2, 1), "sent")
    assert tokens == expected["dense"] and not gauges["kv_fetch_failed_total"]


def test_heads_that_one_rank_does_not_get_are_computed(
    ranks: Ranks,
    others: Ranks,
    folders: Folders,  # noqa: F811
    expected: Expected,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The other ranks have theirs and write nothing."""
    tokens, gauges = served(ranks, others, folders["dense"], tmp_path, (1, 2), "lost")
    assert tokens == expected["dense"]
    assert gauges["kv_fetch_failed_total"] >= 1 and not gauges["kv_fetched_total"]


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 6])
def test_every_head_of_every_rank_comes_once(kv_heads: int) -> None:
    sizes = [ranks for ranks in (1, 2, 3, 4, 6, 8, 12) if divides(kv_heads, ranks)]
    assert len(sizes) >= 4 and not divides(kv_heads, 0) and not divides(4, 3)
    for senders in sizes:
        for receivers in sizes:
            slices = head_slices(kv_heads, senders, receivers)
            assert (0, 0) in slices
            for receiver in range(receivers):
                wanted, came = own_heads(kv_heads, receivers, receiver), {}
                for (sender, to), heads in slices.items():
                    if to == receiver:
                        given = list(own_heads(kv_heads, senders, sender))
                        whole = range(len(given))
                        for place, at in zip(heads.received or whole, heads.sent or whole, strict=True):
                            assert place not in came
                            came[place] = given[at]
                assert [came[place] for place in range(len(wanted))] == list(wanted)


def test_ranks_with_the_same_head_share_the_work() -> None:
    assert {sender for sender, _ in head_slices(1, 4, 2)} == {0, 1}
    assert {sender for sender, _ in head_slices(2, 8, 4)} == {0, 1, 6, 7}


def test_a_decode_server_whose_ranks_do_not_divide_the_heads_is_refused(folders: Folders) -> None:  # noqa: F811
    address = free_address()
    side = Side(folders["dense"], replace(SERVE, role="prefill", prefill=address))
    try:
        connection = PrefillConnection(
            side.worker,
            None,
            address=address,
            fingerprint=side.part.fingerprint,
            ranks=3,  # type: ignore
        )
        with pytest.raises(BadInput, match="3 ranks do not divide 2 KV heads"):
            connection.connect()
    finally:
        side.close()
