"""Stages 4 and 5 of the demo: the trained model behind a real server process, and what its clients see under load."""

import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty, Queue

from armillary.cli.demo.state import RECIPE, DemoState
from armillary.cli.load import run_load
from armillary.cli.output import Output
from armillary.diagnosis.readings.run_folder import read_run
from armillary.diagnosis.report.demo_report import Served
from armillary.errors import ArmillaryError
from armillary.machine.memory import peak_of
from armillary.serving.load.report_text import LATENCY_HEADS, errors_text, latency_rows
from armillary.serving.load.run import LoadReport, LoadTest
from armillary.spec.plan import Plan
from armillary.spec.recipe import to_toml
from armillary.spec.tables.traffic import Traffic
from armillary.store.atomic import write_text
from armillary.store.home import Home
from armillary.store.runs import Run, list_runs
from armillary.units import seconds_text

START_S, STOP_S = 90.0, 20.0
"""how long a server may take to start and to stop"""
PROMPT = "def read_lines(path):\n"
_READY = re.compile(r"ready on (http://\S+)")


def serve_and_load(state: DemoState, trained: Run) -> Run:
    """The server as the recipe sets it, and what its clients see; gives the server's run."""
    before = {run.id for run in list_runs(state.home)}
    with ExitStack() as until_loaded:
        with state.stage("serve", f"armillary serve {trained.name}, in a process of its own") as say:
            recipe = trained.folder / "demo.toml"  # with what was overridden: the serve verb reads [serve] alone
            write_text(recipe, to_toml(state.recipe) if state.overrides else RECIPE.read_text())
            url, pid = until_loaded.enter_context(server(state.home, trained, recipe, show=state.out))
            run = _new_run(state.home, before)
            text = planned_text(run)
            state.out.say(text)
            state.out.say(f"» {PROMPT}{ask(url, PROMPT)}")
            say(f"answers OpenAI's clients; {text}")
        report = _load(state, url)
        peak = peak_memory(pid)
    state.update(served=Served(reading=read_run(run, state.home), load=report, peak_bytes=peak))
    return run


def serve_changed(state: DemoState, trained: Run, recipe: Path) -> Run:
    """The same with a lever applied, under the same requests."""
    before = {run.id for run in list_runs(state.home)}
    plan = state.report.served.reading.plan if state.report.served is not None else None
    dtype = () if plan is None else ("--set", f"serve.dtype={plan.layout.precision}")  # auto may find another one now
    with server(state.home, trained, recipe, *dtype, show=Output("silent")) as (url, pid):
        run = _new_run(state.home, before)
        state.out.say(planned_text(run))
        report, peak = load(state, url), peak_memory(pid)
    state.update(served_after=Served(reading=read_run(run, state.home), load=report, peak_bytes=peak))
    return run


def planned_text(run: Run) -> str:
    """What the planner predicts for the server and its traffic: times, or why there are none."""
    plan = Plan.from_json(run.plan.read_text(), str(run.plan))
    names = {"ttft_p50_s": "TTFT p50", "itl_p50_s": "ITL p50", "e2e_p99_s": "end to end p99"}
    times = [
        f"{name} {seconds_text(plan.predicted[gauge])}" for gauge, name in names.items() if gauge in plan.predicted
    ]
    return "planned: " + (", ".join(times) or "; ".join(plan.notes) or "nothing")


def _new_run(home: Home, before: set[str]) -> Run:
    runs = [run for run in list_runs(home) if run.id not in before]
    if not runs:
        raise ArmillaryError(f"the server left no run in {home.runs}; report this with armillary doctor --json")
    return runs[0]


# --- under load


def _load(state: DemoState, url: str) -> LoadReport:
    traffic = state.recipe.traffic
    about = (
        f"{traffic.requests_per_s:g} requests/s of {traffic.tokens_in} + {traffic.tokens_out} tokens for "
        f"{traffic.duration_s:g} s"
    )
    with state.stage("load", about) as say:
        report = load(state, url)
        last = report.last
        times = f"TTFT p99 {seconds_text(last.ttft.p99_s)}, ITL p99 {seconds_text(last.itl.p99_s)}"
        say(f"{times}, {last.tokens_out_per_s:,.0f} tokens/s, {last.slo_met_fraction:.0%} met every objective")
        return report


def load(state: DemoState, url: str, traffic: Traffic | None = None, *, key: str = "") -> LoadReport:
    """The recipe's traffic on the server, as `armillary load` sends it; or other traffic."""
    recipe = state.recipe
    test = LoadTest(traffic=traffic or recipe.traffic, load=recipe.load, objective=recipe.objective)
    report, _ = run_load(state.out, url, test, key=key)
    rows = [row for row in latency_rows(report) if row[0] in ("TTFT", "ITL", "end to end")]
    state.out.table("", LATENCY_HEADS, rows)
    last = report.last
    if last.failed == last.requests:
        raise ArmillaryError(f"no request was answered: {errors_text(report)}; try longer serve.max_model_len")
    state.out.say(
        f"throughput  {last.tokens_out_per_s:,.0f} tokens/s out · goodput {last.goodput_requests_per_s:.3g} "
        f"requests/s ({last.slo_met_fraction:.0%}) · {last.failed} errors"
    )
    return report


# --- the process


@contextmanager
def server(home: Home, trained: Run, recipe: Path, *flags: str, show: Output) -> Iterator[tuple[str, int]]:
    """`armillary serve RUN` until the block ends; gives its address and its process once it is ready."""
    words = ("serve", str(trained.folder), "--port", "0", "--recipe", str(recipe), *flags)
    with running(home, *words, show=show) as started:
        yield started


@contextmanager
def running(home: Home, *words: str, show: Output) -> Iterator[tuple[str, int]]:
    """A command that serves until the block ends; gives its address and its process once it is ready."""
    place = ["--home", str(home.work)] if home.work == home.cache else []
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "armillary", *words, *place],
        cwd=home.work,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines: Queue[str | None] = Queue()
    reader = threading.Thread(target=_pass_on, args=(process, lines), daemon=True)
    reader.start()
    try:
        yield _wait_until_ready(process, lines, show), process.pid
    finally:
        _end(process)
        reader.join(STOP_S)
        if process.stdout is not None:
            process.stdout.close()


def _pass_on(process: subprocess.Popen[str], lines: Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.rstrip())
    lines.put(None)  # it has ended


def _wait_until_ready(process: subprocess.Popen[str], lines: Queue[str | None], show: Output) -> str:
    said: list[str] = []
    while True:
        try:
            line = lines.get(timeout=START_S)
        except Empty:
            raise ArmillaryError(f"the server was not ready after {START_S:g} s; try armillary serve") from None
        if line is None:
            raise ArmillaryError(
                f"the server ended at once ({said[-1] if said else 'without a word'}); try armillary serve by itself"
            )
        said.append(line)
        show.say(line)
        if match := _READY.search(line):
            return match.group(1)


def _end(process: subprocess.Popen[str]) -> None:
    """Let running requests finish, then terminate."""
    for end in (process.terminate, process.terminate, process.kill):
        if process.poll() is None:
            end()
        try:
            process.wait(STOP_S / 2)
            return
        except subprocess.TimeoutExpired:
            continue


def peak_memory(pid: int) -> float | None:
    """Most memory that the largest of a process and its children had; none where the system does not say."""
    pids = [pid]
    with suppress(OSError):  # it may end meanwhile
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return max((peak for process in pids if (peak := peak_of(process)) is not None), default=None)


def ask(url: str, prompt: str, tokens: int = 32) -> str:
    """One completion, as any client would ask for it."""
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.7, "top_p": 0.9, "seed": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])
