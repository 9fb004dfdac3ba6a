"""Profiling a user's unmodified script: it runs with a recording window, and its trace is read."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from armillary.errors import ArmillaryError, BadInput, NotFound
from armillary.machine.device_name import device_name
from armillary.profiling.analysis.analyse import analyse_file
from armillary.profiling.profile import Profile
from armillary.profiling.record.run_script import LAUNCHERS, NO_TORCH, inside, is_torchrun, split
from armillary.store.home import Home

_STEP_KINDS = {
    "optimizer": "optimiser steps",
    "forward": "forward passes",
    "compiled": "calls of what torch.compile made",
}


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """A script's profile and its own exit code."""

    profile: Profile
    code: int


@dataclass(frozen=True, kw_only=True)
class Command:
    """`python [OPTIONS] SCRIPT …` taken apart; `target` is the script or -m module, and its arguments."""

    python: str
    options: tuple[str, ...]
    target: tuple[str, ...]

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
) -> ScriptProfile:
    """Run `python script.py …` and profile `steps` of its steps; `stop` ends it when they are recorded.

    The script's output is passed through, or goes to `stdout`.
    """
    command = parse(words)
    if stop and is_torchrun(command.target):
        raise BadInput("one rank cannot end the job of all; leave --stop out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace, seen, request = trace_path or folder / "trace.json", folder / "seen.json", folder / "request.json"
        wanted = {"steps": steps, "stop": stop, "trace": str(trace.absolute()), "seen": str(seen)}
        request.write_text(json.dumps(wanted))
        code = _run(command, request, stdout)
        if not seen.exists():
            raise _nothing_recorded(command, code)
        return ScriptProfile(profile=_read(command, trace, json.loads(seen.read_text()), home), code=code)


def parse(words: Sequence[str]) -> Command:
    """The interpreter, its options, and what it runs; `torchrun …` is `python -m torch.distributed.run …`."""
    if words and Path(words[0]).name == "torchrun":
        words = [_python_of(words[0]), "-m", LAUNCHERS[0], *words[1:]]
    if not words or not Path(words[0]).name.startswith("python"):
        raise BadInput(f"'{' '.join(words[:1])}' is not python; write armillary profile -- python SCRIPT …")
    options, target = split(words[1:])
    if not target or target[0] in ("-c", "-") or target == ("-m",):
        raise BadInput("nothing to profile after python; give a script file or -m MODULE")
    if target[0] != "-m" and not Path(target[0]).is_file():
        raise NotFound(f"no script {target[0]}; check the path")
    python = sys.executable if words[0] in ("python", "python3") else shutil.which(words[0])
    if python is None:
        raise NotFound(f"no program {words[0]}; check the path")
    return Command(python=python, options=options, target=target)


def _python_of(program: str) -> str:
    """The interpreter that a program was installed for."""
    path = shutil.which(program)
    if path is None:
        raise NotFound(f"no program {program}; check the path")
    python = Path(path).with_name("python")
    return str(python) if python.exists() else sys.executable


def _run(command: Command, request: Path, stdout: Any) -> int:
    """The script's exit code."""
    line = [command.python, *inside(str(request), command.options, command.target)]
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
    cpu = device_name("cpu", threads=seen["threads"])
    result = analyse_file(trace, home, source=command.name, cpu=cpu, plain_s=seen["plain_s"])
    return replace(result, notes=(*result.notes, *_notes(seen)))


def _notes(seen: dict[str, Any]) -> list[str]:
    """What the reader has to know of how the recording was made."""
    notes = [_steps_note(seen)]
    if seen["rank"]:
        notes.append(f"{seen['rank']}; the others ran beside it and were not")
    if seen["their_profiler"]:
        notes.append(
            "the script uses torch's profiler itself: nothing was recorded while its own ran; what it exports "
            "can be read with armillary profile TRACE"
        )
    if seen["compiled"]:
        notes.append("modules have no names here, as hooks on them would change what torch.compile makes")
    if seen["children"]:
        notes.append(
            f"{seen['children']} child process{'es were' if seen['children'] > 1 else ' was'} not recorded, "
            "only the one that started them; torchrun's first rank would be"
        )
    return notes


def _steps_note(seen: dict[str, Any]) -> str:
    what = _STEP_KINDS.get(seen["what"])
    if what is None:
        return "no optimiser step or repeated forward pass was seen: the whole run is one step, imports included"
    if not seen["warm"] and seen["their_profiler"]:
        return f"the script's own profiler left too few of {seen['seen']} {what} to ours: this is what ran before them"
    if not seen["warm"]:
        return f"only {seen['seen']} {what} were seen: this is the first, which is cold; let it run longer"
    return f"{seen['steps']} {what} were recorded, after {seen['seen'] - seen['steps']} that were not"
