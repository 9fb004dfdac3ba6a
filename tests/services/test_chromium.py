"""Pages in a real browser: what Chromium makes of them, by the document after its scripts have run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.diagnosis.report.demo_page import page as demo_page
from armillary.profiling.report.profile_page import write_page
from tests.diagnosis.demo_reports import made_report
from tests.profiling.profiles import made_profile
from tests.serving.tiny import make_folder, run_server

pytestmark = pytest.mark.services


def rendered(url: str, profile: Path) -> str:
    """The document that Chromium holds once it has loaded `url` and run its scripts."""
    line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    shown = subprocess.run(
        [*line, "--virtual-time-budget=5000", "--dump-dom", url], capture_output=True, text=True, timeout=120
    )
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def visible(document: str) -> str:
    """Text of the document, without styles and scripts."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"<(style|script)\b.*?</\1>", "", document, flags=re.DOTALL))


def test_the_profile_report(tmp_path: Path) -> None:
    page = write_page(made_profile(), tmp_path / "profile.html")
    document = rendered(page.absolute().as_uri(), tmp_path / "chromium")
    assert document.count("<section") == 9 and document.count('class="point"') == 2 * 3, "wide and narrow drawings"
    assert "<title>train.py: profile</title>" in document
    for text in ("Roofline", "launch gaps", "train.py:88", "peak 5.00 GB"):
        assert text in visible(document), text


def test_the_demo_report(tmp_path: Path) -> None:
    (tmp_path / "demo.html").write_text(demo_page(made_report()), encoding="utf-8")
    document = rendered((tmp_path / "demo.html").as_uri(), tmp_path / "chromium")
    assert document.count("<section") == 9 and 'aria-label="Loss over steps' in document
    assert "interrupted after step 80, resumed" in visible(document)


def test_the_chat_page_finds_the_served_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny")
    with run_server(folder) as server:
        document = rendered(server.url, tmp_path / "chromium")
    assert "<title>armillary chat</title>" in document and "tiny" in visible(document)


def test_the_web_page_fills_every_tab(tmp_path: Path) -> None:
    """The script asks for the result, and bad input is said at its field."""
    line = [sys.executable, "-m", "armillary", "web", "--port", "0", "--home", str(tmp_path / "home")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            for tab, shown in (
                ("plan", "together"),
                ("catalogue", "full speed from 295 FLOP per byte"),
                ("runs", "There is no run yet"),
                ("diagnose", "There is no run yet"),
                ("serve&url=http://127.0.0.1:9", "no metrics page at"),
                ("plan&layout.tp=3", "no valid layout has layout.tp=3"),
            ):
                document = rendered(f"{url}/?tab={tab}", tmp_path / "chromium")
                assert shown in visible(document), tab
                assert "The page does not answer" not in document, tab
        finally:
            server.terminate()
