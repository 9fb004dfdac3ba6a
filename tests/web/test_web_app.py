"""The page: every tab, bad input at its field, and what a caller may not do."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from armillary.fleet.autoscale.decision_log import Logged, append, newest
from armillary.fleet.autoscale.policy import Decision
from armillary.fleet.autoscale.signals import Signals
from armillary.store.gauges import GaugeWriter
from armillary.store.home import Home
from armillary.store.runs import Run, create_run
from armillary.web.tabs.server_tab import is_loopback as is_loopback_url
from armillary.web.web_app import WebApp, is_loopback
from tests.diagnosis.trained import plan_of, run_of

HOSTS = frozenset({"127.0.0.1"})


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.at(tmp_path)


def get(
    app: WebApp,
    path: str,
    query: dict[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes = b"",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request, in process."""
    sent: list[dict[str, Any]] = []
    given = {"host": "127.0.0.1:8080", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": urlencode(query or {}).encode(),
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


def part(app: WebApp, **query: str) -> dict[str, Any]:
    status, _, body = get(app, "/part", query)
    assert status == 200
    answer: dict[str, Any] = json.loads(body)
    return answer


def test_a_plan_follows_the_form_and_is_what_the_planner_says(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    view = part(app, tab="plan", **{"model.name": "llama-3-8b", "hardware.on": "h100x8", "layout.tp": "2"})
    assert view["errors"] == {} and "tp=2" in view["html"] and "<svg" in view["html"]
    for chart in ("Roofline of H100 SXM, fp8", "Cost over devices", "Duration over devices", "<title>qkv: "):
        assert chart in view["html"], chart
    dearer = part(app, tab="plan", **{"cost.usd_per_device_hour": "100", "report.budget_usd": "1"})
    assert "above $1" in dearer["html"]
    small = {"model.name": "armillary-2m", "train.sequence": "256", "train.batch_tokens": "4096"}
    assert part(app, tab="plan", **{"hardware.on": "here"}, **small)["errors"] == {}
    status, headers, body = get(app, "/document", {"to": "md", "model.name": "llama-3-8b"})
    assert status == 200 and "llama-3-8b.md" in headers["content-disposition"] and body.startswith(b"# Infrastructure")


def test_a_serving_plan_keeps_what_was_typed_for_training(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    query = {"tab": "plan", "for": "serve", "train.steps": "77", "show": "1"}
    page = get(app, "/", query)[2].decode()
    assert re.search(r"decode, \d+ at a time", page) and "Cost per million tokens over requests per second" in page
    assert "Ways to serve" in page and "<input type='hidden' name='train.steps' value='77'>" in page


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model.name", "lama-3-8b"),
        ("hardware.on", "h100x"),
        ("train.sequence", "many"),
        ("train.batch_tokens", "1"),
        ("layout.tp", "3"),
        ("layout.recompute", "sometimes"),
        ("cost.usd_per_device_hour", "-1"),
    ],
)
def test_bad_input_is_said_at_its_field_and_nothing_is_lost(home: Home, field: str, value: str) -> None:
    app = WebApp(home, hosts=HOSTS)
    view = part(app, tab="plan", **{field: value})
    assert list(view["errors"]) == [field] and view["html"] == ""
    page = get(app, "/", {"tab": "plan", field: value, "train.steps": "123", "show": "1"})[2].decode()
    assert re.search(rf"id='{re.escape(field)}' [^>]*aria-invalid='true'", page)
    assert f"value='{value}'" in page and "value='123'" in page


def test_the_catalogue_side_by_side(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    view = part(app, tab="catalogue", models="llama-3-8b", chips="h100-sxm, l4")
    assert "H100 SXM: full speed from 295 FLOP per byte" in view["html"] and "121 TFLOP/s" in view["html"]
    assert list(part(app, tab="catalogue", chips="h1000")["errors"]) == ["chips"]
    assert list(part(app, tab="catalogue", models=", ".join(["gpt2"] * 7))["errors"]) == ["models"]


def test_runs_and_their_diagnosis(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    assert "There is no run yet" in part(app, tab="runs")["html"]
    names = []
    for _ in range(2):
        run = create_run(home, {"model": {"name": "<b>gpt2</b>"}}, model="<b>gpt2</b>", steps=20)
        with GaugeWriter(run.gauges) as gauges:
            for step in range(1, 21):
                gauges.write(
                    {"loss": 5 - step / 10, "tokens_per_s": 1e4, "step_s": 0.1, "data_wait_s": 0.05}, step=step
                )
        names.append(run.id)
    view = part(app, tab="runs", run=names[0], other=names[1])
    assert view["errors"] == {} and view["html"].count("<polyline") >= 4 * 2 and "<b>gpt2" not in view["html"]
    assert list(part(app, tab="runs", run="no-such-run")["errors"]) == ["run"]
    assert list(part(app, tab="diagnose", run="no-such-run")["errors"]) == ["run"]
    assert part(app, tab="diagnose", run=names[0])["errors"] == {}


def test_a_servers_run_has_no_planned_steps(home: Home) -> None:
    run = create_run(home, {"model": {"name": "gpt2"}}, model="gpt2")
    with GaugeWriter(run.gauges) as gauges:
        for step in range(1, 9):
            gauges.write({"running": 3, "kv_used_fraction": 0.5, "engine_step_s": 0.01}, step=step)
    html = part(WebApp(home, hosts=HOSTS), tab="runs")["html"]
    assert "Running requests" in html and "KV cache in use" in html and "Loss" not in html and "None" not in html


def test_the_newest_run_is_one_that_measured_something(home: Home) -> None:
    measured = create_run(home, {"model": {"name": "gpt2"}}, model="gpt2")
    with GaugeWriter(measured.gauges) as gauges:
        for step in range(1, 9):
            gauges.write({"running": 3, "engine_step_s": 0.01}, step=step)
    create_run(home, {"model": {"name": "gpt2"}}, model="gpt2").update(state="failed", error="no port")
    app = WebApp(home, hosts=HOSTS)
    assert f"Run {measured.id}" in part(app, tab="runs")["html"]
    assert f"Run {measured.id}" in part(app, tab="diagnose")["html"]


def test_the_budget_is_of_profiled_steps(home: Home) -> None:
    """Waiting for data is measured in every step; the rest of an unprofiled one is not unknown time."""
    run = create_run(home, {"model": {"name": "gpt2"}}, model="gpt2", steps=8)
    with GaugeWriter(run.gauges) as gauges:
        for step in range(1, 9):
            profiled = {"compute_s": 0.08} if step == 5 else {}
            gauges.write({"step_s": 0.1, "data_wait_s": 0.01, **profiled}, step=step)
    html = part(WebApp(home, hosts=HOSTS), tab="runs")["html"]
    assert "compute <b>80.0%</b>" in html and "rest <b>10.0%</b>" in html


@pytest.fixture
def measured_run(home: Home) -> Run:
    """A run whose loader holds it up, so that there is a lever."""
    return run_of(home, plan_of(), name="quiet-otter", data_wait_s=0.5)


def test_only_a_page_of_ours_writes_a_recipe_and_only_where_it_may(
    home: Home, tmp_path: Path, measured_run: Run
) -> None:
    app = WebApp(home, hosts=HOSTS, writes=tmp_path)
    html = part(app, tab="diagnose", run=measured_run.id)["html"]
    number = re.search(r"name='lever' value='(\d+)'", html)
    assert number is not None, "a lever that can be applied"
    form = {"csrf": app.csrf, "run": measured_run.id, "lever": number[1]}
    written = tmp_path / f"{measured_run.name}.lever{number[1]}.toml"
    for status, of, headers in (
        (403, {**form, "csrf": "guessed"}, {}),
        (403, form, {"origin": "http://evil.example"}),
        (403, form, {"origin": "null"}),
        (400, {**form, "lever": "99"}, {}),
    ):
        assert get(app, "/recipe", method="POST", body=urlencode(of).encode(), **headers)[0] == status, of
        assert not written.exists()
    read_only = WebApp(home, hosts=HOSTS)
    body = urlencode({**form, "csrf": read_only.csrf}).encode()
    assert get(read_only, "/recipe", method="POST", body=body)[0] == 400 and not written.exists()
    body = urlencode(form).encode()
    status, headers, _ = get(app, "/recipe", method="POST", body=body, origin="http://127.0.0.1:8080")
    assert status == 303 and measured_run.id in headers["location"] and written.is_file()
    assert f"written: {written.name}" in part(app, tab="diagnose", run=measured_run.id)["html"]
    assert get(app, "/recipe", method="POST", body=body)[0] == 400, "nothing is overwritten"


def test_a_chat_needs_our_page_and_a_server_here(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    ask = json.dumps({"url": "http://127.0.0.1:9", "messages": [{"role": "user", "content": "hi"}]}).encode()
    assert get(app, "/chat", method="POST", body=ask)[0] == 403
    assert get(app, "/chat", method="POST", body=b"[]", x_csrf_token=app.csrf)[0] == 400
    away = ask.replace(b"127.0.0.1:9", b"10.0.0.1")
    assert get(app, "/chat", method="POST", body=away, x_csrf_token=app.csrf)[0] == 400
    status, _, said = get(app, "/chat", method="POST", body=ask, x_csrf_token=app.csrf)
    assert status == 502 and b"is the server running?" in said


def test_names_are_text(home: Home) -> None:
    app, bad = WebApp(home, hosts=HOSTS), "\"'><script>alert(1)</script>"
    for tab, field in (("plan", "model.name"), ("catalogue", "chips"), ("runs", "run"), ("serve", "url")):
        page = get(app, "/", {"tab": tab, field: bad, "show": "1"})[2].decode()
        assert "<script>alert" not in page and "&lt;script&gt;" in page, tab
    assert get(app, "/", {"tab": bad})[0] == 404


def test_who_may_call(home: Home) -> None:
    app = WebApp(home, hosts=HOSTS)
    assert get(app, "/", host="evil.example:8080")[0] == 403, "a name that another site has pointed here"
    assert get(app, "/", method="POST")[0] == 405 and get(app, "/etc/passwd")[0] == 404
    status, headers, _ = get(app, "/")
    assert status == 200 and "default-src 'none'" in headers["content-security-policy"]
    exposed = WebApp(home, token="secret")
    assert get(exposed, "/")[0] == 401 and get(exposed, "/part", {"token": "wrong"})[0] == 401
    status, headers, _ = get(exposed, "/", {"token": "secret"})
    assert status == 303 and "HttpOnly; SameSite=Strict" in headers["set-cookie"]
    assert get(exposed, "/", cookie=f"a=b; {headers['set-cookie'].split(';')[0]}")[0] == 200


def test_replicas_and_scaling_decisions_of_services(home: Home) -> None:
    """Also where no server answers at the address: the logs are files."""
    log = home.work / "services" / "my <b>bot" / "decisions.jsonl"
    for now, before, replicas, reason in ((10.0, 1, 1, "enough"), (12.0, 1, 3, "rate <i>"), (14.0, 3, 3, "enough")):
        signals = Signals(now=now, ready=before)
        decision = Decision(now=now, replicas=replicas, before=before, reason=reason)
        append(log, Logged(signals=signals, decision=decision))
    with log.open("a") as file:
        file.write('{"cut off')
    view = part(WebApp(home, hosts=HOSTS), tab="serve", url="http://127.0.0.1:9")
    assert "url" in view["errors"] and "3 ready, 0 starting, 3 wanted" in view["html"]
    assert "1 → 3</td><td>rate &lt;i&gt;" in view["html"] and view["html"].count("→") == 1
    assert "my &lt;b&gt;bot" in view["html"] and "Replicas over time" in view["html"]
    assert newest(log, most_bytes=600)[-1].decision.now == 14.0


def test_only_this_machine_is_looked_at(home: Home) -> None:
    urls = ("http://127.0.0.1:8000", "http://localhost:1", "https://[::1]/v1")
    assert all(map(is_loopback_url, urls)) and is_loopback("127.0.0.1") and not is_loopback("0.0.0.0")
    for url in ("http://10.0.0.1", "file:///etc/passwd", "http://example.com", "http://[", "gopher://127.0.0.1", ""):
        assert not is_loopback_url(url), url
