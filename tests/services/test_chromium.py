"""Pages in a real browser: what Chromium makes of them, by the document after its scripts have run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from armillary.diagnosis.report.demo_page import page as demo_page
from armillary.fleet.autoscale import service_page
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
    assert document.count("<section") == 10 and 'aria-label="Loss over steps' in document
    assert "interrupted after step 80, resumed" in visible(document)


SERVICE = {
    "model": "bot",
    "target": 2,
    "replicas": [
        {
            "name": "replica-1",
            "url": "http://127.0.0.1:1",
            "state": "ready",
            "healthy": True,
            "in_flight": 3,
            "requests": 4123,
            "start_s": 9.2,
            "release": "registry:bot:1",
            "role": "",
        },
        {
            "name": "replica-2",
            "url": "http://127.0.0.1:2",
            "state": "ready",
            "healthy": True,
            "in_flight": 0,
            "requests": 12,
            "start_s": 9.9,
            "release": "registry:bot:2",
            "role": "canary",
        },
    ],
    "parked": 0,
    "signals": {"ttft_p99_s": 0.2, "itl_p99_s": 0.5, "arrived_per_s": 3.25, "waiting": 1, "kv_used": 0.25},
    "history": [
        {
            "now": 10.0 + at,
            "ready": 1,
            "arrived_per_s": at,
            "in_flight": 1,
            "kv_used": 0.1,
            "ttft_p99_s": None,
            "itl_p99_s": 0.1 * at,
        }
        for at in range(6)
    ],
    "capacity_requests_per_s": 8.0,
    "decisions": [{"now": 4.0, "before": 1, "replicas": 2, "reason": "the rate needs 1.4", "panic": False}],
    "objective": {"ttft_p99_s": 0.3, "itl_p99_s": 0.4},
    "rollout": {
        "release": "registry:bot:2",
        "strategy": "canary",
        "state": "canary",
        "reason": "",
        "progress": "12 so far",
    },
    "usage": [{"client": "<b>me</b>", "model": "bot", "prompt_tokens": 1000, "completion_tokens": 10, "usd": 0.5}],
    "now": 16.0,
}
"""what /service.json of a service says"""


def test_the_page_of_a_service(tmp_path: Path) -> None:
    """Objectives are judged in words, clients' names stay text, and charts have names for those who cannot see them."""
    html = (Path(service_page.__file__).parent / "service.html").read_text()
    state = json.dumps(SERVICE).replace("</", "<\\/")
    stub = f"<script>window.fetch = async () => ({{ok: true, json: async () => ({state})}})</script><script>"
    (tmp_path / "page.html").write_text(html.replace("<script>", stub, 1))
    document = rendered((tmp_path / "page.html").as_uri(), tmp_path / "chromium")
    text = " ".join(visible(document).split())
    for said in (
        "! fewer replicas than wanted",
        "1 of 2 replicas ready",
        "TTFT p99 ✓ met 200 ms",
        "ITL p99 ✗ missed 500 ms",
        "registry:bot:2 by canary: it gets a share of the requests and is judged – 12 so far",
        "registry:bot:2 (canary)",
        "1 → 2 the rate needs 1.4",
        "&lt;b&gt;me&lt;/b&gt; bot 1,000 10 0.5000",
    ):
        assert said in text, text
    assert 'aria-label="ITL p99 over the last 5.0 s, at most 0.500"' in document and 'scope="col"' in document


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
