"""Choices: kept per device, merged, and refused when broken."""

from __future__ import annotations

import pytest

from armillary.errors import BadData
from armillary.store.home import Home
from armillary.store.kernel_choices import choices_path, load_choice, load_choices, save_choice


def test_kept_per_device_and_key(home: Home) -> None:
    assert load_choice(home, "NVIDIA H200", "norm a") is None
    save_choice(home, "NVIDIA H200", "norm a", {"version": "triton"})
    save_choice(home, "NVIDIA H200", "norm b", {"version": "compile"})
    save_choice(home, "NVIDIA H200", "norm a", {"version": "eager", "trials": []})
    assert load_choices(home, "NVIDIA H200") == {
        "norm a": {"version": "eager", "trials": []},
        "norm b": {"version": "compile"},
    }
    assert load_choices(home, "NVIDIA H100") == {}
    assert choices_path(home, "NVIDIA H200").name == "nvidia-h200.json"


def test_a_name_that_only_looks_the_same_is_another_device(home: Home) -> None:
    save_choice(home, "NVIDIA H200", "a", {"version": "x"})
    assert load_choices(home, "nvidia h200") == {}


def test_a_broken_file_says_what_to_do(home: Home) -> None:
    path = choices_path(home, "cpu")
    path.parent.mkdir(parents=True)
    path.write_text('{"device": "cpu"}')
    with pytest.raises(BadData, match="delete it"):
        load_choices(home, "cpu")
