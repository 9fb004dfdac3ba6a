"""Runs a user's unmodified script and records a window of it: the child process of `armillary profile -- python …`.

    python -c '…; main()' REQUEST SCRIPT ARGUMENTS…      or: REQUEST -m MODULE ARGUMENTS…

REQUEST is a JSON file that says how many steps to record and where the trace goes; next to it a second file is left
that says what was seen. Of a job that torchrun starts, the first rank of this machine is recorded, the others run
unchanged. Only torch and the standard library are used, as the script may have an environment of its own.
"""

import atexit
import functools
import gc
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")
NO_TORCH = 3
"""exit code when the script's interpreter has no torch"""

_WITH_VALUE = ("-W", "-X")
"""options of python that take a value"""


class EnoughRecorded(SystemExit):
    """Ends the script once the steps are recorded, where that was asked for."""


def split(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of python, and the script or -m module with its arguments."""
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _WITH_VALUE else 1
    return tuple(words[:at]), tuple(words[at:])


def inside(request: str, options: Sequence[str], target: Sequence[str], begin: str = "main") -> list[str]:
    """Words after `python` that run `target` with a window; ours comes last on its path, so that its own packages are
    found first."""
    root = str(Path(__file__).parents[3])
    code = (
        f"import sys; sys.path.append({root!r}); from armillary.profiling.record.run_script import {begin}; {begin}()"
    )
    return [*options, "-c", code, request, *target]


def main() -> None:
    """The beginning of a script, or of torchrun."""
    request, target = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    _need_torch()
    if not is_torchrun(target):
        sys.exit(_recorded(request, target))
    path = sys.argv[1]
    launcher = follow_launcher(lambda words: inside(path, *split(words), "rank"))
    sys.exit(run(target, launcher.main if target[:2] == ["-m", launcher.__name__] else None))


def rank() -> None:
    """The beginning of a rank of torchrun."""
    request, target = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    _need_torch()
    if not is_recorded_rank():
        sys.exit(run(target))
    code = _recorded(request, target)
    _shut_down()
    _end_at_once(code)  # threads of gloo and of the recording have been seen to abort a rank at exit


def _shut_down() -> None:
    """What Python does at its end: threads are waited for, exit functions called, forgotten files closed."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    gc.collect()


def _need_torch() -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is loaded
    try:
        import torch  # noqa: F401 - whether there is one
    except ImportError:
        sys.exit(NO_TORCH)


def _recorded(request: dict[str, Any], target: list[str]) -> int:
    from armillary.profiling.record.recording_window import RecordingWindow

    written: list[bool] = []

    def done() -> None:
        write_recording(window, request)
        written.append(True)
        if request["stop"]:
            raise EnoughRecorded(0)

    window = RecordingWindow(request["steps"], done)
    window.open()
    atexit.register(lambda: _end_at_once(code) if window.lost else None)  # the first one in is the last one out
    code = run(target)
    if not written and window.own:
        write_recording(window, request)
    return code


def _end_at_once(code: int) -> None:
    """Python's own shutdown crashes on a recording that was never stopped."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(target: list[str], begin: Callable[[], object] | None = None) -> int:
    """The script as if Python had been given it, or `begin` in its place; its exit code."""
    program = _python(target)
    try:
        (begin or program)()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        _show(error)
        return 1
    return 0


def _python(target: list[str]) -> Callable[[], object]:
    if target[0] == "-m":
        sys.argv, sys.path[0] = target[1:], os.getcwd()
        return lambda: runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = target, str(Path(target[0]).resolve().parent)
    return lambda: runpy.run_path(target[0], run_name="__main__")


def _show(error: BaseException) -> None:
    """The traceback the script would have had by itself: our frames and runpy's are left out."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def write_recording(window: Any, request: dict[str, Any]) -> None:
    import torch

    recorder = window.close()
    recorder.save(Path(request["trace"]))
    seen = {
        "steps": recorder.steps,
        "seen": window.seen,
        "what": window.script.what,
        "compiled": window.script.compiled,
        "their_profiler": window.user_profiler.met,
        "children": window.children.count,
        "rank": rank_note(),
        "warm": recorder is window.recorder,
        "plain_s": window.plain_s,
        "threads": torch.get_num_threads(),
    }
    Path(request["seen"]).write_text(json.dumps(seen))


# --- torchrun


def is_torchrun(target: Sequence[str]) -> bool:
    """Whether what is run is torchrun, as a module or as a program."""
    return (target[1] if target[0] == "-m" else Path(target[0]).name) in LAUNCHERS


def is_recorded_rank() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def rank_note() -> str:
    """A note on which rank was recorded; '' outside torchrun."""
    if "LOCAL_RANK" not in os.environ:
        return ""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank} of {world} was recorded"


def follow_launcher(inside: Callable[[Sequence[str]], list[str]]) -> Any:
    """Have every rank started through `inside(options and target)`; returns torchrun's module, which turns its options
    into one command for all ranks in a single function."""
    from torch.distributed import run

    plain = run.config_from_args

    @functools.wraps(plain)
    def config_from_args(args: Any) -> tuple[Any, Any, Any]:
        config, command, words = plain(args)
        if isinstance(command, str) and Path(command).name.startswith("python"):
            words = inside(words)
        return config, command, words

    run.config_from_args = config_from_args
    return run
