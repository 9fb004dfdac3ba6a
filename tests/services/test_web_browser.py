"""The page of `armillary web` in Chromium, as a person uses it: typing, keyboard, a run and a load test under way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docx
import pytest

from tests.services.small_training import RECIPE, write_text
from tests.serving.tiny import make_folder, run_server

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright; make setup installs it")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core; make setup installs it")
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium; make test-services installs it"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
TABS = ("plan", "plan&for=serve", "catalogue", "runs", "serve", "diagnose")
PHONE = {"width": 390, "height": 844}
PATIENCE_MS = 120_000
POINTS = "[...document.querySelectorAll('.on-wide polyline')].reduce((n, l) => n + l.points.numberOfItems, 0)"
"""of all lines that are drawn for a wide screen"""
SERIOUS = ("serious", "critical")


@contextmanager
def started(line: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "armillary", *line], stdout=subprocess.PIPE, text=True, cwd=folder, env={**os.environ}
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def run_id(place: Path) -> str:
    """A finished run, for the tabs that show one."""
    write_text(place / "text")
    recipe = RECIPE.format(text=place / "text", steps=24, more="").replace("dp = 2", "dp = 1")
    (place / "small.toml").write_text(recipe.replace("profile_every = 0", "profile_every = 10"))
    line = [sys.executable, "-m", "armillary", "train", "small.toml", "--home", "home"]
    done = subprocess.run(line, cwd=place, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return next(iter((place / "home" / "runs").glob("*-*"))).name


@pytest.fixture(scope="module")
def url(place: Path, run_id: str) -> Iterator[str]:
    with started(["web", "--port", "0", "--home", "home", "--write"], place) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; the test fails where its console has an error or an exception was thrown."""
    with opened(browser) as page:
        yield page


@contextmanager
def opened(browser: Any, **options: Any) -> Iterator[Any]:
    context = browser.new_context(**options)
    page, wrong = context.new_page(), list[str]()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert wrong == []


def until(page: Any, script: str) -> None:
    """Wait for an expression to be true; the page's own policy forbids the browser to poll it."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(script):
        assert time.monotonic() < end, script
        page.wait_for_timeout(200)


def show(page: Any, url: str, tab: str) -> None:
    """Open a tab and wait for its result, or for a message at its field."""
    page.goto(f"{url}/?tab={tab}")
    page.wait_for_selector("#result section, .error:not(:empty)")
    until(page, "!document.getElementById('result').hasAttribute('aria-busy')")


def drawn(page: Any) -> int:
    return int(page.evaluate(POINTS))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("tab", TABS)
def test_every_tab_is_accessible_and_fits_a_phone(browser: Any, url: str, tab: str, scheme: str) -> None:
    with opened(browser, viewport=PHONE, color_scheme=scheme) as page:
        show(page, url, tab)
        found = axe.Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in SERIOUS] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.locator("section").count() >= 1


def test_a_plan_is_changed_and_exported(page: Any, url: str, tmp_path: Path) -> None:
    show(page, url, "plan")
    for title in ("Memory per device", "Step time", "Roofline", "Layouts", "Cost of the run", "Duration"):
        assert page.get_by_role("heading", name=title, exact=True).is_visible(), title
    page.get_by_label("Tensor parallel").fill("2")
    until(page, "document.querySelector('#result td:nth-child(2)').textContent.startsWith('tp=2')")
    assert "layout.tp=2" in page.url, "the state is in the address"
    page.get_by_label("Steps").fill("777")
    page.get_by_label("Tensor parallel").fill("3")
    page.wait_for_selector("[id='layout.tp-error']:not(:empty)")
    assert page.get_by_label("Tensor parallel").get_attribute("aria-invalid") == "true"
    assert page.get_by_label("Steps").input_value() == "777", "nothing is lost"
    assert "tp=2" in page.inner_text("#result"), "the last result stays"
    page.get_by_label("Tensor parallel").fill("2")
    until(page, "document.querySelector('[id=\"layout.tp-error\"]').textContent === ''")
    page.reload()
    assert page.get_by_label("Steps").input_value() == "777", "a bookmark is the same plan"
    page.wait_for_selector("text=docx")
    with page.expect_download() as download:
        page.get_by_role("link", name="docx").click()
    download.value.save_as(tmp_path / "plan.docx")
    text = "\n".join(cell.text for table in docx.Document(str(tmp_path / "plan.docx")).tables for cell in table._cells)
    assert "777" in text


def test_the_first_view_comes_within_a_second(page: Any, url: str) -> None:
    script = "performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    times = []
    for _ in range(3):
        page.goto(url)
        times.append(float(page.evaluate(script)))
    assert min(times) < 1000, times


def test_it_works_by_keyboard(page: Any, url: str) -> None:
    show(page, url, "plan")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "result"
    page.get_by_role("link", name="Catalogue").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Rooflines")
    page.get_by_label("Models, separated by commas").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("gpt2")
    page.wait_for_selector("#result th:has-text('gpt2')")


def test_charts_follow_a_run(page: Any, url: str, place: Path, run_id: str) -> None:
    steps = ["--set", "train.steps=4000", "--set", "train.seed=5"]
    with started(["train", "small.toml", "--home", "home", "--new", *steps], place):
        page.goto(f"{url}/?tab=runs")
        until(page, "/running/.test(document.getElementById('result').textContent)")
        page.wait_for_selector(".on-wide polyline")
        before = drawn(page)
        until(page, f"{POINTS} > {before} + 3")
        page.get_by_label("Compared with").fill(run_id)
        until(page, "document.querySelectorAll('.two section').length === 2")


def test_charts_follow_a_load_test_and_the_chat_answers(page: Any, url: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    with run_server(folder) as server:
        load = [
            "load",
            server.url,
            "--rate",
            "4",
            "--duration",
            "30",
            "--set",
            "traffic.tokens_in=16",
            "--set",
            "traffic.tokens_out=16",
        ]
        with started(load, tmp_path):
            page.goto(f"{url}/?tab=serve&url={server.url}")
            page.wait_for_selector("section:has-text('Latencies') .on-wide polyline")
            before = drawn(page)
            until(page, f"{POINTS} > {before}")
            page.get_by_label("Message").fill("Hello <b>there</b>")
            page.keyboard.press("Enter")
            until(page, "document.querySelector('#talk .answer').textContent.length > 3")
        assert page.locator("#talk .own").inner_text() == "Hello <b>there</b>"
        assert page.locator("#talk .error").count() == 0


def test_a_changed_recipe_is_written_once(page: Any, url: str, place: Path, run_id: str) -> None:
    show(page, url, f"diagnose&run={run_id}")
    buttons = page.get_by_role("button", name="Write the changed recipe")
    if not buttons.count():
        pytest.skip("no lever of this run changes its recipe")
    number = buttons.first.get_attribute("aria-label").rsplit(" ", 1)[1]
    buttons.first.click()
    page.wait_for_selector("text=written:")
    assert (place / f"{run_id.split('-', 3)[3]}.lever{number}.toml").is_file()
