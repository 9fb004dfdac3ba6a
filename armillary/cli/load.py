"""`armillary load`: a server under load, and what its clients would have seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from armillary.cli.output import Output, path_text
from armillary.cli.verb_decorator import moved, set_option, verb
from armillary.errors import BadInput
from armillary.spec.recipe import Recipe, load_service_recipe, recipe_from_dict
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.serving.load.rate_search import SearchResult
    from armillary.serving.load.run import LoadReport, LoadTest
    from armillary.serving.load.sender import Watch

ABOVE_0 = click.FloatRange(0, min_open=True)


@verb
@click.argument("url")
@click.option("--recipe", type=click.Path(path_type=Path), help="Its [traffic], [objective], [load] and [cost].")
@click.option("--rate", type=ABOVE_0, metavar="R", help="Open loop: requests per second.")
@click.option("--clients", type=click.IntRange(1), metavar="N", help="Closed loop: N clients that wait for answers.")
@click.option("--duration", type=ABOVE_0, metavar="S", help="Seconds that are measured, after the warm-up.")
@click.option("--search", is_flag=True, help="Search the highest rate that is sustained.")
@click.option("--page", type=click.Path(path_type=Path, dir_okay=False), help="Write a report with plots there (HTML).")
@click.option("--key", default="", help="API key.")
@set_option
@moved("--trace", "try --set load.trace=FILE")
@moved("--price", "try --set cost.usd_per_device_hour=2.5")
def load(
    out: Output,
    home: Home,
    url: str,
    recipe: Path | None,
    rate: float | None,
    clients: int | None,
    duration: float | None,
    search: bool,
    page: Path | None,
    key: str,
    overrides: tuple[str, ...],
) -> None:
    """Send requests to the OpenAI-compatible server at URL and report TTFT, ITL, TPOT, throughput and goodput.

    Lengths, bursts, ramps, repeats and objectives are keys of a recipe: --set traffic.tokens_in=128, --set
    traffic.arrival=gamma, --set load.ramp_to=20, --set load.repeats=5, --set objective.ttft_p99_s=0.5. So are a trace
    to replay (Azure's CSV, Mooncake's JSONL), --set load.trace=conv.csv, and the price of what serves, for the cost of
    a million tokens: --set cost.usd_per_device_hour=2.5.
    """
    flags = {"traffic.requests_per_s": rate, "load.concurrency": clients, "traffic.duration_s": duration}
    given = [*overrides, *(f"{name}={value}" for name, value in flags.items() if value is not None)]
    unnamed = {"model": {"name": "served"}}  # the server knows which model it is
    asked = load_service_recipe(recipe, given) if recipe else recipe_from_dict(unnamed, given)
    hour = _price(asked, given=recipe is not None)
    _more_files()
    report, result = run_load(out, url, _test(asked, search), key=key, search=search)
    from armillary.serving.load import load_page
    from armillary.serving.load.report_text import plain
    from armillary.store.atomic import write_text

    if page is not None:
        write_text(page, load_page.page(report, result, hour))
    _show(out, report, result, hour, page)
    best = result.best if result else None
    quiet = f"{best:.4g}" if best is not None else f"{report.last.goodput_requests_per_s:.4g}"
    out.result(plain(report, result, hour), quiet=quiet)


def _test(recipe: Recipe, search: bool) -> LoadTest:
    from armillary.serving.load.run import LoadTest

    if search and (recipe.load.concurrency or recipe.load.trace or recipe.load.ramp_to):
        raise BadInput("--search varies the rate of an open loop; leave --clients, load.trace and load.ramp_to out")
    return LoadTest(traffic=recipe.traffic, load=recipe.load, objective=recipe.objective)


def _price(recipe: Recipe, *, given: bool) -> float | None:
    """Dollars per hour of all that serves: the recipe's devices at their price; where it names none, one device."""
    if recipe.hardware.is_here:
        return recipe.cost.usd_per_device_hour
    if not given and recipe.cost.usd_per_device_hour is None:
        return None
    from armillary.planning.cost.cost import device_hour

    cluster = recipe.cluster()
    return device_hour(recipe.cost, cluster).usd_per_useful_hour * cluster.num_devices


def _more_files() -> None:
    """Every stream is an open file; take as many as the machine allows."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_load(
    out: Output, url: str, test: LoadTest, *, key: str = "", search: bool = False
) -> tuple[LoadReport, SearchResult | None]:
    """The test with its progress shown, and with `search` the highest rate that is sustained."""
    from armillary.serving.load.probe import probe
    from armillary.serving.load.rate_search import rate_runner, search_rate
    from armillary.serving.load.run import report_of, run_once

    probed = probe(url, test.load, key=key)
    runs, best = [], None
    if search:
        with _bars(out, test) as bar:
            tries = rate_runner(probed, test, show=lambda rate: bar(f"{rate:.3g} requests/s"))
            best = search_rate(tries, test.objective, start=test.traffic.requests_per_s)
        runs.append(best.run)
        test = test.at_rate(best.best or test.traffic.requests_per_s)
    for repeat in range(len(runs), test.load.repeats):
        with _bars(out, test) as bar:
            runs.append(run_once(probed, test, repeat=repeat, watch=bar(f"run {repeat + 1} of {test.load.repeats}")))
    return report_of(probed, test, runs), best


@contextmanager
def _bars(out: Output, test: LoadTest) -> Iterator[Callable[[str], Watch]]:
    """One bar in seconds; each run restarts it."""
    from armillary.serving.load.run import sending_s

    total = sending_s(test)
    with out.progress("load", total=total, unit="s") as bar:

        def watch(name: str) -> Watch:
            def update(now: float, under_way: int, done: int, failed: int) -> None:
                live = {"under_way": under_way, "answered": done, "failed": failed} if done or under_way else {}
                bar.at(max(0.0, min(now, total)), total, now=name, **live)

            return update

        yield watch


def _show(out: Output, report: LoadReport, best: SearchResult | None, hour: float | None, page: Path | None) -> None:
    from armillary.serving.load import report_text as words

    out.say(words.title_text(report))
    heads, rows = words.narrow(words.LATENCY_HEADS, words.latency_rows(report), repeats=len(report.runs))
    out.table("", heads, rows)
    out.fields("", words.rate_rows(report, hour))
    if best is not None:
        out.table("rates tried", words.ATTEMPT_HEADS, words.attempt_rows(best))
        out.say(words.best_text(best))
    for note in report.notes:
        out.say(f"note: {note}")
    where = f"report: {path_text(page.resolve())}" if page else "plots: --page report.html"
    out.say(f"{where} · what each figure means: docs/load.md, and `definitions` of --json")
