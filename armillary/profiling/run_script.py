"""Runs somebody's script, unmodified, with a window of it recorded: the inside of `armillary profile -- python …`.

    python -c '…; main()' REQUEST SCRIPT ARGUMENTS…      or: REQUEST -m MODULE ARGUMENTS…

REQUEST is a JSON file that says how many steps to record and where the trace goes; beside it a second file is left
that says what was seen. Only torch and the standard library are used, as the script may have an environment of its own.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_TORCH = 3
"""exit code when the script's interpreter has no torch"""


class EnoughRecorded(SystemExit):
    """Ends the script once the steps are recorded, where that was asked for."""


def main() -> None:
    request, target = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2:]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch is loaded
    try:
        import torch  # noqa: F401 - whether there is one
    except ImportError:
        sys.exit(NO_TORCH)
    sys.exit(_recorded(request, target))


def _recorded(request: dict[str, Any], target: list[str]) -> int:
    from armillary.profiling.window import Window

    def done() -> None:
        leave(window, request)
        if request["stop"]:
            raise EnoughRecorded(0)

    window = Window(request["steps"], done)
    window.open()
    code = run(target)
    if not window.finished:
        leave(window, request)
    return code


def run(target: list[str]) -> int:
    """The script as if Python had been given it; its exit code."""
    try:
        _python(target)()
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


def leave(window: Any, request: dict[str, Any]) -> None:
    """Write the trace and what was seen."""
    import torch

    recorder = window.close()
    recorder.save(Path(request["trace"]))
    seen = {
        "steps": recorder.steps,
        "seen": window.seen,
        "what": window.what,
        "warm": recorder is window.recorder,
        "plain_s": window.plain_s,
        "threads": torch.get_num_threads(),
    }
    Path(request["seen"]).write_text(json.dumps(seen))
