"""One job at several sizes: the boundary where the speed per device drops, and the part that takes what is lost."""

from __future__ import annotations

import pytest

from armillary.diagnosis.outcome.run_sizes import compare_sizes
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.readings.torchtitan import read_torchtitan
from armillary.errors import BadInput
from tests.diagnosis.logs import titan_log
from tests.diagnosis.trained import plan_of, reading_of

TOKENS_PER_DEVICE = 16_384
MESH = "Building 1-D device mesh with ['dp_shard']"


def of_size(devices: int, step_s: float, **gauges: float) -> Reading:
    """A step of so many seconds on so many devices, with the same tokens on each."""
    job = f"train.batch_tokens={devices * TOKENS_PER_DEVICE}"
    return reading_of(plan_of(f"hardware.on=h100x{devices}", f"layout.dp={devices}", job), step_s=step_s, **gauges)


def test_communication_that_leaves_the_node_is_the_boundary() -> None:
    runs = [
        of_size(32, 1.6, comm_exposed_s=0.6),
        of_size(8, 1.0, comm_exposed_s=0.02),
        of_size(16, 1.5, comm_exposed_s=0.5),
    ]
    found = compare_sizes(runs)
    assert [run.devices for run in found.runs] == [8, 16, 32]
    boundary = found.boundary
    assert boundary is not None and (boundary.before.devices, boundary.after.devices) == (8, 16)
    assert boundary.part == "comm_exposed" and boundary.loss == pytest.approx(1 - 1 / 1.5)
    assert boundary.part_share == pytest.approx(0.48 / 0.5)
    assert "no longer fit into one domain of 8" in boundary.says and "33%" in boundary.says


def test_sizes_that_keep_their_speed_have_no_boundary() -> None:
    found = compare_sizes([of_size(8, 1.0), of_size(16, 1.01), of_size(64, 1.02)])
    assert found.boundary is None and "64 devices keep 98%" in found.says


def test_a_loader_that_feeds_all_devices_is_named() -> None:
    found = compare_sizes([of_size(8, 1.0, data_wait_s=0.01), of_size(16, 1.4, data_wait_s=0.4)])
    assert found.boundary is not None and found.boundary.part == "data_wait"


def test_logs_of_torchtitan_are_sizes_too() -> None:
    small, large = (
        read_torchtitan(
            titan_log(step_s=lambda step, s=s: s, more=(f"{MESH}, [{devices}]",)).splitlines(), str(devices)
        )
        for devices, s in ((8, 1.0), (64, 1.3))
    )
    found = compare_sizes([large, small])
    assert [run.devices for run in found.runs] == [8, 64]
    assert found.boundary is not None and found.boundary.part == "work", "a log says no more"


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(BadInput, match="both ran on 8"):
        compare_sizes([of_size(8, 1.0), of_size(8, 1.1)])
    with pytest.raises(BadInput, match="on how many devices"):
        compare_sizes([reading_of(), of_size(8, 1.0)])
