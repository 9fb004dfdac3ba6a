"""Sizes of datasets and checkpoints, and the bandwidth that keeps devices fed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.errors import BadInput
from armillary.planning.cost.storage import checkpoint_bytes, fit, fits, run_storage
from armillary.spec import catalogue
from armillary.spec.arithmetic.params import parameters

LLAMA = catalogue.model("llama-3.1-8b").config
RUN: dict[str, Any] = {"tokens_per_s": 1e6, "total_tokens": 1e12, "interval_s": 600.0}
CLUSTER = catalogue.cluster("dgx-h100x8")


def test_a_checkpoint_is_fourteen_bytes_a_parameter() -> None:
    assert checkpoint_bytes(LLAMA) == 14 * parameters(LLAMA).total
    assert checkpoint_bytes(LLAMA, weight_bytes=4) == 12 * parameters(LLAMA).total
    assert checkpoint_bytes(LLAMA, optimizer=False) == 2 * parameters(LLAMA).total


def test_a_dataset_of_a_large_vocabulary_takes_four_bytes_a_token() -> None:
    assert run_storage(LLAMA, **RUN).dataset.size_bytes == 4e12
    assert run_storage(catalogue.model("llama-2-7b").config, **RUN).dataset.size_bytes == 2e12


def test_bandwidths_by_hand() -> None:
    found = run_storage(LLAMA, **RUN, stall_s=10.0, restart_s=100.0, copies=4)
    size = checkpoint_bytes(LLAMA)
    assert found.dataset.read_bytes_per_s == pytest.approx(8e6)
    assert found.checkpoint.write_bytes_per_s == pytest.approx(size / 10)
    assert found.checkpoint.read_bytes_per_s == pytest.approx(4 * size / 100)
    assert run_storage(LLAMA, **RUN).checkpoint.write_bytes_per_s == pytest.approx(size / 600), "beside the training"


def test_a_nas_is_one_server_while_nodes_bring_their_own_drives() -> None:
    need = run_storage(LLAMA, **RUN).checkpoint
    nas, nvme = catalogue.storages()["nas"], catalogue.storages()["nvme-gen4"]
    assert fit(need, nas, nodes=8).read_bytes_per_s == nas.read_bytes_per_s
    assert fit(need, nvme, nodes=8, drives=8).read_bytes_per_s == 64 * nvme.read_bytes_per_s


def test_tiers_that_hold_come_first_the_slowest_of_them_leading() -> None:
    ranked = fits(run_storage(LLAMA, **RUN, stall_s=5.0).checkpoint, CLUSTER)
    held = [one for one in ranked if one.holds]
    assert held and ranked[: len(held)] == held
    assert [one.read_bytes_per_s for one in held] == sorted(one.read_bytes_per_s for one in held)
    assert all(one.short <= 1 for one in held) and all(one.short > 1 for one in ranked[len(held) :])


@given(st.floats(1, 1e9), st.floats(1, 1e9))
def test_more_speed_never_asks_for_less_bandwidth(slow: float, more: float) -> None:
    run = {"total_tokens": 1e12, "interval_s": 600.0}
    low, high = (run_storage(LLAMA, tokens_per_s=rate, **run).dataset for rate in (slow, slow + more))
    assert high.read_bytes_per_s >= low.read_bytes_per_s


def test_nonsense_is_refused() -> None:
    with pytest.raises(BadInput, match="tokens_per_s=0 must be above 0"):
        run_storage(LLAMA, tokens_per_s=0, total_tokens=1, interval_s=1)
    with pytest.raises(BadInput, match="0 nodes"):
        fit(run_storage(LLAMA, **RUN).logs, catalogue.storages()["nas"], nodes=0)
