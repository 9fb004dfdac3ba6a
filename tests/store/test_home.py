"""Where things are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from armillary.errors import NotFound
from armillary.store.home import Home


def test_by_default_work_is_here_and_measurements_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    home = Home.default()
    assert (home.runs, home.data, home.registry) == (tmp_path / "runs", tmp_path / "data", tmp_path / "registry")
    assert home.cache == Path.home() / ".cache" / "armillary"
    assert (home.peaks, home.choices) == (home.cache / "peaks", home.cache / "choices")


def test_one_folder_for_everything(tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    places = (home.runs, home.data, home.registry, home.peaks, home.choices)
    assert [place.parent for place in places] == [tmp_path] * 5
    assert len(set(places)) == 5


def test_the_folder_may_be_relative_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Home.at("here").runs == tmp_path / "here" / "runs"
    assert Home.at("~/there").runs == Path.home() / "there" / "runs"


def test_a_user_without_a_home_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(NotFound, match=r"give --home DIR$"):
        Home.default()
