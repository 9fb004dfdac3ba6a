"""Stages 6 and 7 of the demo: name what limits the training run and the server, apply a lever to each, measure
again."""

from armillary.cli.demo.plan_and_train import train_changed
from armillary.cli.demo.serve_and_load import serve_changed
from armillary.cli.demo.state import RECIPE, DemoState
from armillary.cli.diagnose import first_worthwhile, say_comparison, write_lever
from armillary.cli.diagnose import say as say_verdict
from armillary.cli.output import Output
from armillary.cli.profile.step import recipe_step
from armillary.diagnosis.diagnose import diagnose as diagnose_reading
from armillary.diagnosis.outcome.compare import Comparison, compare
from armillary.diagnosis.outcome.diagnosis import Diagnosis, save
from armillary.diagnosis.readings.run_folder import read_run
from armillary.profiling.profile import Profile
from armillary.profiling.report.profile_text import budget_line
from armillary.store.runs import Run

PROFILED = 2
"""steps under the profiler"""


def diagnose(state: DemoState, trained: Run, service: Run) -> None:
    """Which loop limits each of them, and what each lever would gain; saved before any is applied."""
    with state.stage("diagnose", "which loop limits the training run, and which the server") as say:
        assert state.report.served is not None, "it was served before"
        training, serving = read_run(trained, state.home), state.report.served.reading
        state.update(profile=_profile(state), training=training)
        for run, reading in ((trained, training), (service, serving)):
            diagnosis = diagnose_reading(reading, state.home)
            save(run, diagnosis, state.home)
            say_verdict(state.out, diagnosis, run.name)
            state.update(diagnoses=(*state.report.diagnoses, diagnosis))
            say(diagnosis.headline)


def _profile(state: DemoState) -> Profile:
    """A step of the recipe against the measured ceilings, as `armillary profile` takes it."""
    from armillary.profiling.record.profile_callable import profile

    with recipe_step(Output("silent"), state.home, str(RECIPE), state.overrides, None) as step:
        profiled = profile(
            step, steps=PROFILED, warmup=1, home=state.home, memory=False, stacks=False, source=RECIPE.name
        )
    state.out.say(f"{budget_line(profiled)} (one process)")
    return profiled


def apply(state: DemoState, trained: Run, service: Run) -> None:
    """Apply the first worthwhile lever to each, and compare."""
    with state.stage("lever", "apply the first lever, measure again, compare with the prediction") as say:
        for run, diagnosis in zip((trained, service), state.report.diagnoses, strict=True):
            if diagnosis.is_healthy:
                state.out.say(f"{run.name}: {diagnosis.headline}; no lever is applied")
                continue
            done = _apply(state, trained, run, diagnosis)
            if done is not None:
                state.update(pulled=(*state.report.pulled, done))
                say(f"{done.title or '; '.join(done.notes)}: obtained {done.obtained:.2f} ×")


def _apply(state: DemoState, trained: Run, run: Run, diagnosis: Diagnosis) -> Comparison | None:
    number, job = first_worthwhile(diagnosis), state.recipe.train
    if number is None:
        state.out.say(f"{run.name}: what would help is no key of the recipe; no lever is applied")
        return None
    path = write_lever(state.out, state.home, diagnosis, run, number, run.folder / f"lever{number}.toml")
    after = (
        serve_changed(state, trained, path)
        if diagnosis.kind == "serving"
        else train_changed(state, path, min(job.steps, job.eval_every or job.steps))
    )
    done = compare(run, after, state.home)
    say_comparison(state.out, state.home, done)
    return done
