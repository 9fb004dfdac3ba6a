"""One recording: torch's profiler, module names and Python samples, joined in one Chrome trace.

Only torch and the standard library are used, because this also runs inside other people's scripts.
"""

import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from armillary.profiling.record.hooks import ModuleScopes, OptimizerSizes
from armillary.profiling.record.python_sampler import Sampler, sample_events
from armillary.profiling.trace.event_classes import OPTIMIZERS, STEP


class TraceRecorder:
    """`start()`, then `begin_step()` before each step, `stop()`, and `save(path)`; all from one thread.

    Without `hooks` modules have no names, and `optimizers.see` has to be called for each optimiser.
    """

    def __init__(self, *, memory: bool = True, stacks: bool = True, hooks: bool = True) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at the first start: no lines of the profiler's on stderr
        device = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CPU, *device], record_shapes=True, profile_memory=memory
        )
        self._sampler = Sampler() if stacks else None
        self._hooks = hooks
        self._modules = ModuleScopes()
        self.optimizers = OptimizerSizes()
        self._step: Any = None
        self.steps = 0
        self.running = False
        self.thread = 0
        """the one that is recorded"""

    def start(self) -> None:
        self.running, self.thread = True, threading.get_ident()
        with warnings.catch_warnings(), freed_unknown_block():
            warnings.simplefilter("ignore")  # torch 2.11 warns at every start that it forgets earlier recordings
            self._profiler.start()
        if self._hooks:
            self._modules.start()
            self.optimizers.start()
        with record_function("armillary: first annotation"):  # pays what the first one costs
            pass
        if self._sampler:
            self._sampler.start()

    def drop_hooks(self) -> None:
        """Go on without them."""
        self._hooks = False
        self._modules.stop()
        self.optimizers.stop()

    def begin_step(self) -> None:
        self.end_step()
        self._step = record_function(f"{STEP}{self.steps}")
        self._step.__enter__()

    def end_step(self) -> None:
        """Close the step in progress; on an accelerator, once its work is done."""
        if self._step is not None:
            finish()
            self._step.__exit__(None, None, None)
            self._step = None
            self.steps += 1

    def stop(self) -> None:
        self.abandon()
        self._profiler.stop_trace()
        self.running = False

    def abandon(self) -> None:
        """Leave nothing of ours behind; what torch has recorded is lost with the thread it recorded."""
        if self._sampler:
            self._sampler.stop()
        self.drop_hooks()

    def save(self, path: Path) -> Path:
        """The trace as JSON, samples included."""
        raw = path.with_name(f".{path.name}.raw.json")
        profiler = self._profiler.profiler
        assert profiler is not None
        profiler.kineto_results.save(str(raw))
        try:
            self._join(raw, path)
        finally:
            raw.unlink()
        return path

    def _join(self, raw: Path, path: Path) -> None:
        """Names and samples go in front of torch's own events, whose text stays as it is."""
        text = raw.read_text(errors="replace")
        mark = re.search(r'"traceEvents":\s*\[', text)
        assert mark, "a trace has events"
        parsed = json.loads(text, strict=False)
        base_ns, pid = int(parsed.get("baseTimeNanoseconds", 0)), os.getpid()
        added = self._modules.events(pid, base_ns)
        if self._sampler:
            added += sample_events(self._sampler.samples(), [*added, *parsed["traceEvents"]], base_ns, pid)
        lines = "".join(json.dumps(event) + ",\n" for event in added)
        about = f'"{OPTIMIZERS}": {json.dumps(self.optimizers.lists)},\n'
        path.write_text(f"{text[: mark.start()]}{about}{mark.group()}\n{lines}{text[mark.end() :]}")


def finish() -> None:
    """Wait for the accelerator, so that a step holds all of its own work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


_LINE = b"Memory block of unknown size was allocated before"


@contextmanager
def freed_unknown_block() -> Iterator[None]:
    """Drops the line that torch prints on stderr when memory allocated before a recording is freed.

    torch prints it for the first such block, then for every thousandth. Around the start of a recording, a block of our
    own is the first, and its line is left out; everything else written to stderr in that moment is passed on.
    """
    block = [torch.empty(1)]
    yield
    try:
        stderr = os.dup(2)
    except OSError:  # there is none
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            block.clear()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        file.seek(0)
        rest = b"".join(line for line in file if _LINE not in line)
    if rest:
        os.write(2, rest)
