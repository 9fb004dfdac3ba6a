"""From a recipe to a run: find the model, check that everything divides and can be exported, prepare the data.

Nothing is written before every check has passed. The resulting plan has everything that a rank needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.errors import BadLayout, BadRecipe
from armillary.machine.machine import here
from armillary.model.supported_shapes import refuse_unbuildable
from armillary.model.weights.hf_layout import rules
from armillary.parallel.world import World, join_world
from armillary.profiling.dtypes.choice import resolve_training, resumed_precision
from armillary.spec.arithmetic.params import parameters
from armillary.spec.fp8 import fp8_rule
from armillary.spec.hf.config import to_hf
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.lora import frozen_experts
from armillary.spec.model import ModelConfig
from armillary.spec.plan import Plan
from armillary.spec.recipe import KeyChange, Recipe, check_recipe, load_recipe, to_dict
from armillary.spec.tables.train import TrainJob
from armillary.spec.toml.fields import to_plain
from armillary.store.goodput import last_seen
from armillary.store.home import Home
from armillary.store.resolve_model import ModelSource, resolve_model
from armillary.store.run_events import add_event
from armillary.store.runs import Run, Say, create_run
from armillary.training.checkpoint.resume import Choice, changes_since, run_to_resume, unfinished_run
from armillary.training.checkpoint.stored_run import begin_own, stored_names
from armillary.training.data.corpus_survey import Progress
from armillary.training.gauge_log import Watch
from armillary.training.loop import make_consensus, train
from armillary.training.open_data import may_hold_out, plan_data, prepare_data
from armillary.training.prepare_data import Prepared
from armillary.training.run_lifecycle import Trained
from armillary.training.stopping import Until
from armillary.training.telemetry.trackers import check_trackers


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A checked recipe (as it was given, overrides applied), the plan that every rank reads, and where runs and data
    go."""

    recipe: Recipe
    plan: Plan
    home: Home

    def prepare(self, progress: Progress = lambda done, total, what: None) -> tuple[Prepared, ...]:
        """The recipe's text as shards, made now or earlier; nothing where it is shards already."""
        assert self.plan.data is not None
        return prepare_data(self.recipe.data, self.plan.data, progress)

    def open_run(
        self,
        choice: Choice | None = None,
        *,
        text: str = "",
        overrides: Sequence[str] = (),
        preparing_s: float = 0.0,
    ) -> Run:
        """The run to resume, taken over with a new plan; else a new run. It resumes from its last checkpoint."""
        choice = choice or Choice()
        unfinished = self.to_resume(choice)
        more: dict[str, Any] = {"text": text, "overrides": overrides, "preparing_s": preparing_s}
        if unfinished is None:
            return self.create_run(name=choice.name, new=choice.new, file=choice.file, **more)
        return self.with_settings_of(unfinished).take_over(unfinished, choice, **more)

    def to_resume(self, choice: Choice, say: Say = lambda text: None) -> Run | None:
        """The run to resume; None where a new one is to be created. BadInput where the user has to decide."""
        return run_to_resume(self.home, self.recipe, self.plan.weights, choice, say)

    def unfinished(self) -> Run | None:
        """The newest run of this recipe that is not running and not done."""
        return unfinished_run(self.home, self.recipe, self.plan.weights)

    def changes_since(self, run: Run) -> list[KeyChange]:
        """Keys in which the run's recipe differs from this one, with their classes."""
        return changes_since(run, self.recipe, self.plan.weights)

    def with_settings_of(self, run: Run) -> ResolvedRun:
        """The same with the precision and the compilation that the run was started with, where the recipe leaves them
        to auto: a run resumed elsewhere keeps its precision, and warns where auto would now differ."""
        before, plan = Plan.from_json(run.plan.read_text(), str(run.plan)), self.plan
        if self.recipe.layout.precision == "auto" and before.layout.precision not in ("auto", plan.layout.precision):
            precision = resumed_precision(before.layout.precision, plan.chosen["layout.precision"])
            plan = replace(
                plan,
                layout=replace(plan.layout, precision=precision.dtype),
                notes=(*plan.notes, precision.warning),
                chosen={**plan.chosen, "layout.precision": precision.reason},
            )
        if self.recipe.train.compile == "auto" and before.train is not None and plan.train is not None:
            plan = replace(plan, train=replace(plan.train, compile=before.train.compiled))
        return replace(self, plan=plan)

    def take_over(
        self,
        run: Run,
        choice: Choice,
        *,
        text: str = "",
        overrides: Sequence[str] = (),
        say: Say = lambda text: None,
        preparing_s: float = 0.0,
    ) -> Run:
        """Resume a run with the recipe as it is now and a new plan, after `preparing_s` of data preparation."""
        seen = last_seen(run)
        claimed = run.claim(take_over=choice.take_over, say=say, steps=self.recipe.train.steps)
        file = choice.file or run.recipe_file
        claimed.write_recipe(to_dict(self.recipe), text=text, overrides=overrides, file=file)
        claimed.write_plan(self.plan)
        add_event(claimed.folder, "resumed", seen=seen, preparing_s=preparing_s)
        return claimed

    def create_run(
        self,
        *,
        name: str = "",
        new: bool = False,
        file: str = "",
        text: str = "",
        overrides: Sequence[str] = (),
        preparing_s: float = 0.0,
    ) -> Run:
        """The run's folder with recipe and plan; `text` is the recipe file as it was given, and `preparing_s` how long
        the data took. A run with a `name` continues the one of that name in its store, unless it is to be `new`."""
        run = create_run(
            self.home,
            to_dict(self.recipe),
            text=text,
            overrides=overrides,
            plan=to_plain(self.plan),
            model=self.plan.model.name,
            steps=self.recipe.train.steps,
            name=name,
            file=file,
            taken=() if name else stored_names(self.recipe.train.checkpoint_url),
        )
        if new or not name:
            begin_own(run)
        add_event(run.folder, "created", preparing_s=preparing_s)
        return run


def resolve_run(
    recipe: Recipe,
    home: Home,
    source: ModelSource,
    *,
    cpu_ranks: int = 0,
    fills: int | None = None,
    until: Until | None = None,
    device: str | None = None,
) -> ResolvedRun:
    """Check the recipe against its model, its devices and what the trainer can do; training starts from the weights
    of `source`, or from scratch where it has none. `cpu_ranks` is how many processes may share a CPU's cores, where
    that was asked for, and `fills` how many devices must all be used; `until` is a goal that must be achievable. A
    precision of auto is resolved for the device."""
    config = recipe.model_config(source.config)
    if source.folder is not None and config != source.config:
        keys = ", ".join(f"model.{key}" for key in recipe.model.overrides)
        raise BadRecipe(
            f"{source.name} has weights, so its shape cannot be overridden; leave {keys} out, or take only "
            "its shape with --set train.from_scratch=true"
        )
    _check_model(recipe, config, fills)
    if until is not None:
        until.check(recipe.train, held_out=may_hold_out(recipe.data))
    check_trackers(recipe.train.track)
    cluster = recipe.cluster(here(device=device))
    job = recipe.train
    there = max(cluster.num_devices, cpu_ranks if cluster.chip.kind == "cpu" else 0)
    check_layout(
        recipe.layout,
        config,
        num_devices=there,
        fills=fills,
        sequence=job.sequence,
        batch_tokens=job.batch_tokens,
        by_trainer=True,
        compiled=job.compiled,
    )
    data = plan_data(recipe.data, home, vocab=recipe.data.vocab or config.vocab, tokenizer=_tokenizer(recipe, source))
    dtype = resolve_training(recipe.layout, config, job, cluster, home, device=device)
    plan = Plan(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=to_dict(recipe),
        model=config,
        cluster=cluster,
        layout=replace(recipe.layout, precision=dtype.dtype),
        train=replace(job, compile=job.compiled),
        data=data,
        weights=source.weights,
        chosen={"layout.precision": dtype.reason} if dtype.reason else {},
        notes=(*filter(None, [dtype.warning]), *notes_of(config, recipe.layout, job)),
    )
    return ResolvedRun(recipe=recipe, plan=plan, home=home)


def _check_model(recipe: Recipe, config: ModelConfig, fills: int | None) -> None:
    """What is trained must be buildable and, in the end, exportable: better said now than after the last step."""
    refuse_unbuildable(config)
    rules(config)
    to_hf(config)
    check_recipe(recipe, config)
    recipe.train.check_rates(parameters(config).total)
    # tp first: a layout that could never divide the model is a plainer message than "one device only"
    job = recipe.train
    batch: dict[str, Any] = {"sequence": job.sequence, "batch_tokens": job.batch_tokens} if fills else {}
    check_layout(recipe.layout, config, fills=fills, by_trainer=True, compiled=job.compiled, **batch)


def _tokenizer(recipe: Recipe, source: ModelSource) -> Path | None:
    """The tokenizer asked for, or the model's own; None: one trained on the text, with as many ids as the model has."""
    own = source.files if source.files is not None and (source.files / "tokenizer.json").is_file() else None
    return Path(recipe.data.tokenizer) if recipe.data.tokenizer else own


def model_source(recipe: Recipe, home: Home) -> ModelSource:
    """The recipe's model: a name of the catalogue or a bare config.json is trained from scratch; a folder, a run, a
    release or a Hub id starts from its weights, unless the recipe asks for its shape only."""
    recipe.model.load_code()
    source = resolve_model(recipe.model.source, home, need_weights=False)
    if recipe.train.from_scratch:
        return replace(source, folder=None, url="")
    shape_only = source.origin in ("catalogue", "config")
    return source if shape_only else resolve_model(recipe.model.source, home, need_weights=True)


def refuse_elsewhere(plan: Plan) -> None:
    """What is planned for other machines cannot be started from here; under torchrun or srun it is there already."""
    machine, cluster = here(), plan.cluster
    if cluster.name == "here" and cluster.num_nodes > 1:
        raise BadRecipe(
            f"hardware.nodes={cluster.num_nodes} and this is one machine; try armillary launch, which starts all of "
            "them, or --set hardware.nodes=1"
        )
    same = machine.chip.name == cluster.chip.name and machine.num_devices >= plan.layout.num_devices
    if cluster.name != "here" and not same:
        raise BadRecipe(
            f"{cluster.name} is not this machine, which has {machine.text()}; try --set hardware.on=here, "
            "start it there with torchrun or srun, or plan only with --dry-run"
        )


def train_recipe(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    home: Home | None = None,
    device: str | None = None,
    run: str = "",
    new: bool = False,
    take_over: bool = False,
    until: Until | None = None,
    watch: Watch | None = None,
) -> Trained:
    """Train what a recipe (or its file) says, from the beginning or from where its unfinished run stands. One device is
    this process; for more, every process that torchrun or srun started calls this. `run` names the run, `new` creates
    a new one in any case, and `take_over` resumes one that another process is running."""
    home = home or Home.default()
    ready = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides)
    file = "" if isinstance(recipe, Recipe) else str(Path(recipe).absolute())
    choice = Choice(name=run, new=new, take_over=take_over, file=file)
    until = until or Until.of(ready.train)

    def find() -> ResolvedRun:
        resolved = resolve_run(ready, home, model_source(ready, home), cpu_ranks=world.size, until=until, device=device)
        layout = resolved.plan.layout
        if world.size == 1 < layout.num_devices:
            raise BadLayout(
                f"{layout.text()} needs {layout.num_devices} processes and this is one; use armillary train, which "
                "starts them, or torchrun"
            )
        if world.size == 1:
            refuse_elsewhere(resolved.plan)
        return resolved

    def open_run(resolved: ResolvedRun) -> Run:
        begin = time.perf_counter()
        resolved.prepare()
        return resolved.open_run(choice, overrides=overrides, preparing_s=time.perf_counter() - begin)

    with join_world(device) as world:
        return train_on_ranks(
            world, find, open_run, lambda plan, run: nullcontext(watch), device=device, until=until, home=home
        )


def train_on_ranks(
    world: World,
    find: Callable[[], ResolvedRun],
    open_run: Callable[[ResolvedRun], Run],
    view: Callable[[Plan, Run], AbstractContextManager[Watch | None]],
    *,
    device: str | None,
    until: Until | None,
    home: Home,
    say: Say = lambda text: None,
) -> Trained:
    """Train as one of the ranks of `world`: all find the model, the main rank prepares the data and opens the run for
    all, and `view` shows its steps."""
    ranks = make_consensus(world)
    resolved = ranks.run_long("find the model", find)
    run = ranks.broadcast(ranks.run_long("prepare the data", lambda: open_run(resolved) if world.is_main else None))
    assert run is not None
    plan = Plan.from_json(run.plan.read_text(), str(run.plan))  # as the main rank resolved it
    with view(plan, run) as watch:
        return train(plan, run, device=device, until=until, watch=watch, say=say, home=home)


def notes_of(config: ModelConfig, layout: Layout, job: TrainJob) -> Iterator[str]:
    """What was resolved by a rule, and what a recipe asks for that does not stop training but is not done."""
    if layout.precision == "fp8":
        yield fp8_rule(config, layout, job)
    if job.lora_rank and (layers := frozen_experts(config, job.lora_on)):
        yield f"the experts of {layers} layers carry no adapters and stay as they are"
