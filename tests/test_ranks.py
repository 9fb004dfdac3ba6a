"""The pool of ranks that multi-process tests share."""

from __future__ import annotations

import os
import time

import pytest

from tests.ranks import RankFailed, Ranks


def summed(start: int) -> int:
    import torch
    import torch.distributed as dist

    value = torch.tensor(start + dist.get_rank())
    dist.all_reduce(value)
    return int(value)


def raises_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def hangs_on_one() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)


def dies() -> None:
    os._exit(7)


def process_id() -> int:
    return os.getpid()


def test_ranks_reduce_together(ranks: Ranks) -> None:
    assert ranks.run(2, summed, 10) == [21, 21]


def test_processes_are_kept_between_calls(ranks: Ranks) -> None:
    assert ranks.run(2, process_id) == ranks.run(2, process_id)


def test_another_world_size_has_its_own_group(ranks: Ranks) -> None:
    assert ranks.run(1, summed, 5) == [5]
    assert ranks.run(2, summed, 0) == [1, 1]


def test_an_exception_comes_back_with_its_traceback_and_the_pool_lives_on(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 of 2 failed[\s\S]*raises_on_one[\s\S]*rank one is unhappy"):
        ranks.run(2, raises_on_one)
    assert ranks.run(2, summed, 1) == [3, 3]


def test_a_hang_is_shown_where_it_stands_and_only_that_rank_is_killed(ranks: Ranks) -> None:
    first, second = ranks.run(2, process_id)
    with pytest.raises(RankFailed, match=r"rank 1 of 2 hung for 1 s[\s\S]*hangs_on_one"):
        ranks.run(2, hangs_on_one, timeout_s=1.0)
    assert first in ranks.run(2, process_id)
    assert second not in ranks.run(2, process_id)


def test_a_dead_process_is_reported(ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match="died with exit code 7"):
        ranks.run(1, dies)
    assert ranks.run(1, summed, 0) == [0]


def test_a_local_function_is_refused(ranks: Ranks) -> None:
    def local() -> None: ...

    with pytest.raises(AssertionError, match="top of a module"):
        ranks.run(1, local)


def test_two_workers_keep_tests_on_ranks_together(ranks: Ranks, request: pytest.FixtureRequest) -> None:
    """As the versions of pytest and pytest-xdist in constraints.txt do: else each worker starts a pool of its own."""
    workers = request.config.getoption("loadgroup", False)
    assert request.node.nodeid.endswith("@ranks") == bool(workers)
