"""`armillary plan`: predict before anything runs; search layouts, explain every term, judge against a table."""

import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from armillary.cli.output import Output
from armillary.cli.plan.options import ask, find_cluster, model_config, read_recipe, recipe_options, take_run
from armillary.cli.progress import on_bar
from armillary.cli.verb_decorator import VerbGroup, refuse_verb
from armillary.errors import BadInput, BadLayout, nearest
from armillary.spec.recipe import check_recipe
from armillary.store.home import Home

FOR = click.option(
    "--for",
    "purpose",
    type=click.Choice(["train", "serve"]),
    default="train",
    show_default=True,
    help="What is planned.",
)
ANY = re.compile(r"any(?:x(\d+))?")
ANY_DEVICES, ANY_SHOWN = 64, 10
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""numpy's BLAS reads it when it is loaded; processes that a plan starts do not inherit it"""


class PlanGroup(VerbGroup):
    """`plan RECIPE` and `plan --model M` are short for `plan predict`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help") and args[0] not in self.commands and not ctx.resilient_parsing:
            word = args[0]
            close = nearest(word, self.commands)
            if close and not word.startswith("-") and "." not in word and not Path(word).exists():
                refuse_verb(word, self.list_commands(ctx), ctx)
            args = ["predict", *args]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        _load_numpy()
        return super().invoke(ctx)


def _load_numpy() -> None:
    """numpy without BLAS threads: to start them takes a tenth of a plan's time, and a plan multiplies no matrices."""
    asked = os.environ.get(BLAS_THREADS)
    os.environ[BLAS_THREADS] = "1"
    import_module("numpy")
    os.environ.pop(BLAS_THREADS)
    if asked is not None:
        os.environ[BLAS_THREADS] = asked


plan = PlanGroup(
    "plan",
    help="Predict memory, step time, cost and layout before anything runs.\n\n"
    "`armillary plan RECIPE` or `armillary plan --model M --on h100x64` predicts one plan; "
    "`armillary plan predict --help` lists what it takes.",
)


@plan.verb
@recipe_options
@FOR
@click.option("--from", "run", metavar="RUN", help="Instead of a recipe: a run's, with its diagnosis' lever applied.")
def predict(out: Output, home: Home, purpose: str, run: str | None, **asked: Any) -> None:
    """Memory, step time, throughput and cost of a recipe, or of a model on some devices.

    Without a recipe the best layout is searched for; --on any ranks the catalogue's nodes, as `plan search` does.
    --from RUN plans what its diagnosis asks for: the run's recipe with the first lever applied.
    """
    if run is not None:
        purpose = take_run(out, home, run, asked)
    if _any_node(asked):
        return _search(out, home, asked, purpose, ANY_SHOWN)
    if purpose == "serve":
        return _serve(out, home, asked, "predict")
    from armillary.cli.plan.plan_text import say_training
    from armillary.planning.past_prediction_errors import confidence
    from armillary.planning.training.training_plan import training_plan

    problem, prediction, how = priced(out, home, asked)
    planned = training_plan(problem, prediction)
    known = confidence(home, problem.case.cluster.chip)
    say_training(out, planned, how, str(known) if known else "")
    if run is None:
        _say_next(out, asked)
    within = prediction.step_interval()
    answer = {
        "for": "train",
        "fits": planned.fits,
        "remedy": planned.remedy or None,
        "step_s_interval": [within.low, within.high],
        "plan": planned.plan(),
    }
    out.result(answer, quiet=f"{float(prediction.time.total[0]):.6g}")


def _say_next(out: Output, asked: dict[str, Any]) -> None:
    what = asked["recipe"] or f"--model {asked['model']} --on {asked['on']}"
    what = f"{what} --lora {asked['lora']}" if asked["lora"] else what
    out.say(f"why:     armillary plan explain {what}\nothers:  armillary plan search {what}")


def priced(out: Output, home: Home, asked: dict[str, Any]) -> tuple[Any, Any, str]:
    """(question, the layout priced, where it is from): the recipe's layout, else the best that a search finds."""
    from armillary.planning.device_model.vectorised_layouts import as_arrays
    from armillary.planning.training.layout_prediction import predict as price
    from armillary.planning.training.search import search as library_search
    from armillary.spec.layout_rules.rules import check_layout

    problem = ask(out, home, **asked)
    fixed = _fixed(problem, asked)
    if asked["recipe"] is None:
        check_layout(problem.layout, problem.model, by_trainer=True)
        try:
            result = library_search(problem.case, shown=1, fixed=fixed)
        except BadLayout:
            if not fixed:
                raise
            problem = _filled(problem, fixed)  # what was asked for does not fit: show by how much
        else:
            problem = replace(problem, recipe=replace(problem.recipe, layout=result.best.layout()))
            return problem, result.best, f"   (the fastest of {result.num_fitting:,} that fit)"
    job = problem.recipe.train
    check_layout(
        problem.layout,
        problem.model,
        num_devices=_max_devices(problem),
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        by_trainer=True,
        compiled=job.compiled,
    )
    return problem, price(problem.case, as_arrays([problem.layout])), ""


def _fixed(problem: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What --set says of the layout, which a search does not change."""
    names = [
        text.partition("=")[0].strip().removeprefix("layout.")
        for text in asked["overrides"]
        if text.startswith("layout.")
    ]
    return {name: getattr(problem.layout, name) for name in names}


def _filled(problem: Any, fixed: dict[str, Any]) -> Any:
    """Where some axes and no dp are given, dp fills the devices."""
    layout = problem.layout if "dp" in fixed else problem.layout.on_devices(problem.case.cluster.num_devices)
    return replace(problem, recipe=replace(problem.recipe, layout=layout))


def _max_devices(problem: Any) -> int:
    """Devices a layout may use; any number of processes may share the CPU cores."""
    cluster = problem.case.cluster
    return int(max(cluster.num_devices, problem.layout.num_devices if cluster.chip.kind == "cpu" else 1))


@plan.verb
@recipe_options
@FOR
@click.option("--top", default=10, show_default=True, help="Layouts to show.")
def search(out: Output, home: Home, purpose: str, top: int, **asked: Any) -> None:
    """The best layouts of all that are valid, why the first wins, and what limits it.

    --on any (or anyx128) ranks the catalogue's nodes for the job.
    """
    if top < 1:
        raise BadInput(f"--top {top} shows nothing; try --top 10")
    _search(out, home, asked, purpose, top)


def _any_node(asked: dict[str, Any]) -> re.Match[str] | None:
    return ANY.fullmatch((asked["on"] or "").strip().lower())


def _search(out: Output, home: Home, asked: dict[str, Any], purpose: str, top: int) -> None:
    if purpose == "serve":
        return _serve(out, home, asked, "search")
    from armillary.cli.plan.search import say_search
    from armillary.planning.training.search import search as library_search

    match = _any_node(asked)
    if match:
        return _rank(out, home, asked, int(match.group(1) or ANY_DEVICES))
    problem = ask(out, home, **asked)
    fixed = _fixed(problem, asked)
    if asked["recipe"] is not None:
        fixed |= {name: getattr(problem.layout, name) for name in ("precision", "fp8_scaling", "offload")}
    say_search(out, problem, library_search(problem.case, shown=top, fixed=fixed))


def _rank(out: Output, home: Home, asked: dict[str, Any], devices: int) -> None:
    from armillary.cli.plan.search import say_ranking
    from armillary.planning.node_ranking import rank_nodes

    if devices < 1:
        raise BadInput("anyx0 has no devices; write at least one, like anyx64")
    problem = ask(out, home, **{**asked, "on": f"h100x{devices if devices < 8 else (devices + 7) // 8 * 8}"})
    recipe = problem.recipe
    with out.progress("trying nodes", unit="node") as bar:
        ranked = rank_nodes(
            problem.case,
            devices=devices,
            steps=recipe.train.steps,
            cost=recipe.cost,
            watch=on_bar(bar),
        )
    say_ranking(out, ranked)


@plan.verb
@recipe_options
@FOR
def explain(out: Output, home: Home, purpose: str, **asked: Any) -> None:
    """Every term of a plan, with its formula and its numbers."""
    if _any_node(asked):
        raise BadInput("--on any names no devices to explain; armillary plan search --on any ranks them")
    if purpose == "serve":
        return _serve(out, home, asked, "explain")
    from armillary.cli.plan.plan_text import money_plain, say_money, say_stages
    from armillary.planning.training.explain import explain as explain_terms
    from armillary.planning.training.training_plan import training_plan

    problem, prediction, how = priced(out, home, asked)
    terms, planned = explain_terms(prediction), training_plan(problem, prediction)
    out.say(f"{problem.model.name} on {problem.case.cluster.text()}\n{prediction.layout_text()}{how}")
    out.table("", ["term", "formula", "numbers", "result"], [[t.name, t.formula, t.numbers, t.text] for t in terms])
    say_stages(out, prediction)
    say_money(out, planned)
    out.result(
        {"terms": terms, "plan": planned.plan(), **money_plain(planned)},
        quiet=[f"{term.name.strip()} {term.text}" for term in terms],
    )


def _serve(out: Output, home: Home, asked: dict[str, Any], how: str) -> None:
    from armillary.cli.plan import serving as plan_serving
    from armillary.planning.serving.serving_plan import serving_plan, serving_request

    if asked["lora"]:
        raise BadInput("--lora is for training: merge the adapters and leave --lora out to plan serving")
    every_node = _any_node(asked) is not None
    on = "h100" if every_node else asked["on"]  # any chip stands in for all of them
    recipe = read_recipe(
        asked["recipe"], asked["model"], on, asked["sequence"], asked["batch_tokens"], asked["overrides"]
    )
    config = model_config(out, home, recipe)
    check_recipe(recipe, config, for_training=False)
    if every_node:
        from armillary.planning.node_ranking import rank_serving

        with out.progress("trying nodes", unit="node"):
            ranked = rank_serving(serving_request(recipe, config, find_cluster(recipe), home, is_corrected=False))
        return plan_serving.say_serving_ranking(out, ranked)
    say = {
        "predict": plan_serving.say_serving,
        "search": plan_serving.say_serving_search,
        "explain": plan_serving.explain_serving,
    }[how]
    say(out, serving_plan(recipe, config, find_cluster(recipe), home, search=how == "search"))


@plan.verb
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE.csv")
@click.option("--filter", "filters", metavar="A,B", help="Only such rows: newest, complete, dense, moe, lora.")
@click.option("--physics-only", is_flag=True, help="Leave every fitted number out.")
@click.option("--fit", "fitting", is_flag=True, help="Fit the declared numbers of each framework again.")
@click.option("--write", "target", type=click.Path(path_type=Path), help="Write the table with predictions here.")
def table(
    out: Output, home: Home, file: Path, filters: str | None, physics_only: bool, fitting: bool, target: Path | None
) -> None:
    """Compare predictions with measured configurations.

    FILE.csv has the columns of a table of training runs or of inference runs; which shows in its headings.
    """
    from armillary.cli.plan.table import fit_frameworks, say_fits, say_table, write_beside
    from armillary.planning.published.table import evaluate_table

    if fitting:
        return say_fits(out, fit_frameworks(file))
    names = [name.strip() for name in (filters or "").split(",") if name.strip()]
    evaluation = evaluate_table(file, names, physics_only=physics_only)
    if target is not None:
        write_beside(target, evaluation, file)
    say_table(out, evaluation)
    mape = evaluation.summary["mape"]
    out.result(evaluation.plain(), quiet="nothing to judge" if mape is None else f"{mape:.4f}")


@plan.verb
@click.argument("runs", nargs=-1, metavar="RUN...")
@click.option("--remove", "chip", metavar="CHIP", help="Forget the correction of a chip.")
def calibrate(out: Output, home: Home, runs: tuple[str, ...], chip: str | None) -> None:
    """Correct the plans of this cluster by runs that were measured on it.

    RUN is a run of ours, or LOG=RECIPE.toml with the recipe of what ran: a log of torchtitan, Megatron-LM or the
    Hugging Face Trainer (armillary import makes the recipe), or a metrics page of vLLM, SGLang or TGI under load.
    Computation, communication and overhead get a factor each, which few runs move little; it is kept where it brings
    runs that it has not seen nearer. Training and serving are corrected apart. Without RUN: what is stored.
    """
    from armillary.cli.plan import calibrate as plan_calibrate

    if chip is not None:
        if runs:
            raise BadInput("--remove takes no runs; leave out one of the two")
        return plan_calibrate.forget(out, home, chip)
    if not runs:
        return plan_calibrate.say_corrections(out, home)
    plan_calibrate.calibrate_with(out, home, runs)


@plan.verb
@click.argument("parts", nargs=-1, required=True, metavar="PART=SHARE...")
@click.option("--speedup", "factor", default=2.0, show_default=True, help="How many times as fast a part becomes.")
def amdahl(out: Output, home: Home, parts: tuple[str, ...], factor: float) -> None:
    """Total speed-up from a faster part (Amdahl's law).

    PART=SHARE is a class of work and its share of the time: gemm=0.8, or gemm=80%.
    """
    from armillary.profiling.analysis.amdahl import amdahl as amdahl_rows
    from armillary.profiling.analysis.amdahl import speedup

    rows = [(row, speedup(row.share, factor)) for row in amdahl_rows(dict(map(_share, parts)))]
    cells = [[row.work, f"{row.share * 100:.4g} %", f"{buys:.2f} ×", f"{row.ceiling:.2f} ×"] for row, buys in rows]
    out.table("", ["part", "share", f"{factor:g} × faster gains", "at most"], cells)
    answer = [{"part": row.work, "share": row.share, "speedup": buys, "ceiling": row.ceiling} for row, buys in rows]
    out.result(answer, quiet=[f"{buys:.4g}" for _, buys in rows])


def _share(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
    except ValueError:
        raise BadInput(f"'{text}' is not PART=SHARE; write it like gemm=0.8") from None
    return name, share
