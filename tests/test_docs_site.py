"""The documentation as a site: pages in their order, links that stay inside, and exercises that write their pages."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation() -> None:
    nav = loaded("site_hooks").navigation((ROOT / "docs" / "README.md").read_text())
    lists = [inside for entry in nav for inside in entry.values() if isinstance(inside, list)]
    listed = {path for each in lists for page in each for path in page.values()}
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages - listed == set()


def test_links_out_of_the_docs_become_text() -> None:
    inside_only = loaded("site_hooks").inside_only
    page = ROOT / "docs" / "exercises" / "pipeline_bubbles.md"
    assert inside_only("see [reports](../reports.md#options)", page) == "see [reports](../reports.md#options)"
    assert (
        inside_only("[a](https://example.com) ![b](images/b.svg)", page)
        == "[a](https://example.com) ![b](images/b.svg)"
    )
    assert inside_only("[../web.md](../web.md)", page) == "[The page: armillary web](../web.md)"
    text = "figures are in [bubbles.md](../../benchmarks/pipeline_bubbles.md)"
    assert inside_only(text, page) == "figures are in bubbles.md (`benchmarks/pipeline_bubbles.md`)"


def test_exercises_that_write_their_pages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run replaces the end of the page, and the difference is shown."""
    exercises = loaded("run_exercises")
    assert {"ddp_scaling", "pipeline_bubbles", "plan_to_documents", "precision"} <= set(exercises.names())
    (tmp_path / "examples").mkdir()
    (tmp_path / "small.md").write_text("# Small\n\nold\n")
    script = r"""import pathlib, sys
# from exercise import finish
pathlib.Path(sys.argv[2]).write_text('# Small\n\nnew\n')
"""
    (tmp_path / "examples" / "small.py").write_text(script)
    monkeypatch.setattr(exercises, "ROOT", tmp_path)
    monkeypatch.setattr(exercises, "PAGES", tmp_path)
    assert exercises.names() == ["small"]
    assert exercises.run("small").splitlines()[-2:] == ["-old", "+new"]
    assert exercises.run("small") == "", "nothing has changed"
    with pytest.raises(SystemExit, match="no exercise 'big'; these can be run: small"):
        exercises.main(["big"])
