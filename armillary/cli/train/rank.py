"""One rank of a run, as `armillary train` starts it: `python -m armillary.cli.train.rank TASK`.

It reads the plan from the run's folder, trains, and leaves its outcome, or one line on what went wrong, as a file.
"""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from armillary.cli.main import BUG, INTERRUPTED, OK, USER_ERROR, user_error
from armillary.cli.output import Output
from armillary.store import nan_safe_json
from armillary.store.atomic import write_json

_BROKEN = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|timed? ?out", re.IGNORECASE)


Work = Callable[[dict[str, Any], Output], dict[str, Any]]
"""what a rank does with its task; the main rank's outcome is written"""


def main(task: dict[str, Any], work: Work) -> int:
    rank = int(os.environ["RANK"])
    if rank:
        _print_to(Path(task["logs"]) / f"rank-{rank}.log")
    try:
        outcome = work(task, Output(task["mode"] if rank == 0 else "silent"))
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        known, lost = user_error(error), lost_a_peer(error)
        if known is None and not lost:
            bug = {"bug": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
            write_json(Path(task["answers"]) / f"bug-{rank}.json", bug)
            raise
        why = " ".join(str(error).partition("This is typically caused")[0].split())[:300]  # gloo adds advice
        said = {"lost": why} if lost or known is None else {"error": known[0]}
        write_json(Path(task["answers"]) / f"{next(iter(said))}-{rank}.json", said)
        return USER_ERROR
    if rank == 0:
        write_json(Path(task["answers"]) / "outcome.json", outcome)
    return OK


def lost_a_peer(error: Exception) -> bool:
    """A collective that fails because another rank is gone: that rank's end is the news, not this one's."""
    import torch.distributed as dist

    from armillary.parallel.store_barrier import RankLost

    broken = isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None
    return broken or isinstance(error, dist.DistError | RankLost)


def _print_to(path: Path) -> None:
    """Only the main rank speaks; what others print is for when something goes wrong."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def train_run(task: dict[str, Any], out: Output) -> dict[str, Any]:
    from armillary.cli.train.view import TrainView, outcome_of
    from armillary.spec.plan import Plan
    from armillary.spec.recipe import recipe_from_dict
    from armillary.store.home import Home
    from armillary.store.runs import Run
    from armillary.training.loop import train
    from armillary.training.stopping import Until

    run = Run(folder=Path(task["run"]), owner=task.get("owner", ""))
    home = Home(**{name: Path(path) for name, path in task["home"].items()})
    plan = Plan.from_json(run.plan.read_text(), str(run.plan))
    recipe_from_dict(plan.recipe).model.load_code()
    until = Until.parse(task["until"]) if task["until"] else None
    with TrainView(out, plan, run, brief=task["brief"]) as view:
        done = train(
            plan,
            run,
            device=task["device"],
            until=until,
            watch=view,
            say=out.warn,
            home=home,
            parent=task["parent"],
            leaving=lambda done: write_json(Path(task["answers"]) / "outcome.json", outcome_of(done)),
        )
    return outcome_of(done)


def run_as_rank(work: Work) -> None:
    """As the process that `launch` started."""
    code = main(nan_safe_json.loads(sys.argv[1]), work)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code) if code not in (OK, BUG) else sys.exit(code)  # a failed collective must not keep a rank from ending


if __name__ == "__main__":
    run_as_rank(train_run)
