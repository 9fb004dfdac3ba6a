"""`import armillary`: the verbs as functions, loaded when first used."""

from __future__ import annotations

import importlib
import pkgutil
import typing

import pytest

import armillary


@pytest.mark.parametrize("name", sorted(armillary._API))
def test_every_name_resolves(name: str) -> None:
    module, attribute = armillary._API[name].split(":")
    assert getattr(armillary, name) is getattr(importlib.import_module(module), attribute)


def test_the_lists_agree() -> None:
    assert set(armillary.__all__) == {"__version__", *armillary._API} == set(dir(armillary))


def test_no_name_is_a_subpackage_which_would_take_its_place() -> None:
    assert not set(armillary._API) & {each.name for each in pkgutil.iter_modules(armillary.__path__)}


def test_type_checkers_see_the_same_names() -> None:
    source = importlib.util.find_spec("armillary").loader.get_source("armillary")  # type: ignore[union-attr]
    for name, target in armillary._API.items():
        module, attribute = target.split(":")
        assert f"from {module} import {attribute} as {name}" in source


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'modles'"):
        typing.cast(typing.Any, armillary).modles  # noqa: B018


def test_reading_as_the_readme_shows() -> None:
    assert armillary.models()["llama-3-8b"].config.num_layers == 32
    assert armillary.hardware("h100x16").num_devices == 16
