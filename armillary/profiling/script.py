"""Profile somebody's script as it is: start it with a recording window inside, and read the trace it leaves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import armillary
from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.profiling.analyse import analyse
from armillary.profiling.analyse import device_name as traced_device
from armillary.profiling.device_name import device_name
from armillary.profiling.overhead import with_overhead
from armillary.profiling.profile import Profile
from armillary.profiling.roofline import roof_for
from armillary.profiling.run_script import NO_TORCH
from armillary.profiling.trace import read_trace
from armillary.store.home import Home

_WITH_VALUE = ("-W", "-X")
"""options of python that take a value"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A script's run and its profile."""

    profile: Profile
    """of the steps that were recorded"""
    code: int
    """the script's own exit code"""


@dataclass(frozen=True, kw_only=True)
class Command:
    """`python [OPTIONS] SCRIPT …` taken apart."""

    python: str
    """the interpreter"""
    options: tuple[str, ...]
    """of the interpreter"""
    target: tuple[str, ...]
    """script or -m module, and its arguments"""

    @property
    def name(self) -> str:
        return self.target[1] if self.target[0] == "-m" else self.target[0]


def profile_script(
    words: Sequence[str],
    *,
    home: Home,
    steps: int = 5,
    stop: bool = False,
    trace_path: Path | None = None,
    stdout: Any = None,
) -> Ran:
    """Run `python script.py …` and profile `steps` of its steps; `stop` ends it when they are recorded.

    The script's output is passed through, or goes to `stdout`.
    """
    command = parse(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, seen, request = trace_path or folder / "trace.json", folder / "seen.json", folder / "request.json"
        wanted = {"steps": steps, "stop": stop, "trace": str(trace.absolute()), "seen": str(seen)}
        request.write_text(json.dumps(wanted))
        code = _run(command, request, stdout)
        if not seen.exists():
            raise _nothing_recorded(command, code)
        return Ran(profile=_read(command, trace, json.loads(seen.read_text()), home), code=code)


def parse(words: Sequence[str]) -> Command:
    """The interpreter, its options, and what it runs."""
    if not words or not Path(words[0]).name.startswith("python"):
        raise BadInput(f"'{' '.join(words[:1])}' is not python; write armillary profile -- python SCRIPT …")
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c", "-"):
        at += 2 if words[at] in _WITH_VALUE else 1
    target = tuple(words[at:])
    if not target or target[0] in ("-c", "-") or target == ("-m",):
        raise BadInput("nothing to profile after python; give a script file or -m MODULE")
    if target[0] != "-m" and not Path(target[0]).is_file():
        raise NotFound(f"no script {target[0]}; check the path")
    python = sys.executable if words[0] in ("python", "python3") else shutil.which(words[0])
    if python is None:
        raise NotFound(f"no program {words[0]}; check the path")
    return Command(python=python, options=tuple(words[1:at]), target=target)


def _run(command: Command, request: Path, stdout: Any) -> int:
    """The script's exit code; ours comes last on its path, so that its own packages are found first."""
    root = str(Path(armillary.__file__).parent.parent)
    code = f"import sys; sys.path.append({root!r}); from armillary.profiling.run_script import main; main()"
    line = [command.python, *command.options, "-c", code, str(request), *command.target]
    child = subprocess.Popen(line, stdout=stdout)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:  # the script got it too: let it end, and report what was recorded
            continue


def _nothing_recorded(command: Command, code: int) -> ArmillaryError:
    if code == NO_TORCH:
        return BadInput(f"{command.python} has no torch; name the interpreter that has: armillary profile -- PYTHON …")
    return ArmillaryError(f"{command.name} ended with exit code {code} and left no trace; run it by itself first")


def _read(command: Command, trace: Path, seen: dict[str, Any], home: Home) -> Profile:
    events = read_trace(trace)
    name = traced_device(events) or device_name("cpu", threads=seen["threads"])
    found = analyse(events, roof=roof_for(name, home), source=command.name)
    found = with_overhead(found, seen["plain_s"])
    return replace(found, notes=(*found.notes, *_notes(seen)))


def _notes(seen: dict[str, Any]) -> list[str]:
    whose = {"optimizer": "optimiser steps", "forward": "forward passes"}.get(seen["what"])
    if whose is None:
        return ["no optimiser step or repeated forward pass was seen: the whole run is one step, imports included"]
    if not seen["warm"]:
        return [f"only {seen['seen']} {whose} were seen: this is the first, which is cold; let it run longer"]
    return [f"{seen['steps']} {whose} were recorded, after {seen['seen'] - seen['steps']} that were not"]
