"""`profile(step)`: run a callable a few times under the profiler and say where its time went.

The same steps are first timed without the profiler, so that the profile can say how much the recording itself cost.
What is profiled is handed in as a callable: training, serving and anybody's code alike.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from armillary.errors import BadInput
from armillary.machine.device_name import device_name
from armillary.profiling.analysis.analyse import analyse_file
from armillary.profiling.profile import Profile
from armillary.profiling.record.trace_recorder import TraceRecorder, finish
from armillary.store.home import Home


def profile(
    step: Callable[[], object],
    *,
    steps: int = 5,
    warmup: int = 3,
    home: Home | None = None,
    memory: bool = True,
    stacks: bool = True,
    trace_path: str | Path | None = None,
    source: str = "",
    twin: Callable[[], object] | None = None,
) -> Profile:
    """Where the time of `steps` calls of `step` goes, after `warmup` calls that do not count.

    `memory` records allocations, `stacks` Python stacks; the Chrome trace is stored at `trace_path`. The roofline
    is the one measured on this device and stored in `home`, or the catalogue's. A step that replays a CUDA graph hides
    its operators and shapes: `twin` does the same work without the graph, is called once before the steps, and lends
    its kernels' FLOPs and bytes to those of the graph.
    """
    if steps < 1 or warmup < 0:
        raise BadInput(f"cannot profile {steps} steps after {warmup}; give at least 1 after 0 or more")
    for _ in range(warmup):
        step()
    plain_s = _timed(step, steps)
    recorder = TraceRecorder(memory=memory, stacks=stacks)
    record(recorder, step, steps, twin)
    with tempfile.TemporaryDirectory() as folder:
        path = recorder.save(Path(trace_path or Path(folder) / "trace.json"))
        cpu = device_name("cpu", threads=torch.get_num_threads())
        name = source or getattr(step, "__name__", "step")
        return analyse_file(path, home or Home.default(), source=name, cpu=cpu, plain_s=plain_s)


def record(
    recorder: TraceRecorder, step: Callable[[], object], steps: int, twin: Callable[[], object] | None = None
) -> None:
    """`steps` calls in a recording, after one that pays what the first costs; one that raises still ends it."""
    recorder.start()
    try:
        if twin is not None:
            twin()
        step()
        finish()
        for _ in range(steps):
            recorder.begin_step()
            step()
        recorder.end_step()
    finally:
        recorder.stop()


def _timed(step: Callable[[], object], steps: int) -> float:
    """Median seconds of a plain step."""
    seconds = []
    for _ in range(steps):
        finish()
        begin = time.perf_counter()
        step()
        finish()
        seconds.append(time.perf_counter() - begin)
    return median(seconds)
