"""The [hardware] table: a string, tiers, or this machine."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.errors import BadInput, BadRecipe, NotFound
from armillary.spec import catalogue
from armillary.spec.tables.hardware import HardwareTable
from armillary.spec.toml.fields import build


def table(**values: Any) -> HardwareTable:
    return build(HardwareTable, values, "hardware")


def test_a_hardware_string() -> None:
    assert table(on="h100x16").cluster().num_devices == 16


def test_here_is_what_the_caller_found() -> None:
    here = catalogue.cluster("h200x2")
    assert table().is_here and table().cluster(here) is here


def test_nested_tiers() -> None:
    inner, outer = {"link": "nvlink-4", "count": 8}, {"link": "ib-ndr", "count": 4, "oversubscription": 2}
    cluster = table(chip="h100-sxm", tiers=[inner, outer]).cluster()
    assert cluster.num_devices == 32 and cluster.fast_domain == 8
    assert cluster.tiers[1].bytes_per_s == cluster.tiers[1].link.bytes_per_s / 2
    assert table(chip="h100-sxm").cluster().num_devices == 1


def test_contradictions_and_unknown_names_are_refused() -> None:
    with pytest.raises(BadRecipe, match="not both"):
        table(on="h100x8", chip="h100-sxm")
    with pytest.raises(BadRecipe, match="tiers need a chip"):
        table(tiers=[{"link": "nvlink-4", "count": 8}])
    with pytest.raises(NotFound, match="no link 'nvlnk-4'; did you mean nvlink-4"):
        table(chip="h100-sxm", tiers=[{"link": "nvlnk-4", "count": 8}]).cluster()
    with pytest.raises(BadInput, match="count"):
        table(chip="h100-sxm", tiers=[{"link": "nvlink-4", "count": 0}]).cluster()
