"""What a small model in a process of its own tells the planner: the cost of a torch call in an engine step on this CPU,
and the memory that a process takes beside its tensors.

Small models spend most of a step outside their arithmetic: Python, dispatch, threads that meet. Libraries differ by
hundreds of megabytes between architectures and builds. Both differ too much between machines to be constants, so they
are measured with the real engine and kept with the ceilings, as kinds "calls" and "process".
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from armillary.errors import ArmillaryError
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.planning.replica import Replica
    from armillary.serving.engine.engine import Engine
    from armillary.spec.service import Serve

MODEL, VOCAB = "armillary-5m", 4096
ROWS = (1, 2)
"""requests decoded together"""
PROMPT, SHORT, LONG = 128, 8, 24
"""tokens of a prompt, and of answers of two lengths, whose difference is decode steps alone"""
TRIES, REST_S = 5, 0.03
"""answers of each kind, and the pause before each: a server's caches are cold when a request comes"""
ENOUGH_S = 5.0
"""of answers; where they are slow, two of each kind will do"""
TIMEOUT_S = 60.0
KV_BYTES = 16_000_000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the process found."""

    call_s: float
    """a torch call in an engine step"""
    process_bytes: float
    """of the process at its most, beside weights, KV cache and activations"""


def calibrate(home: Home) -> Calibration:
    """Measured in a fresh process and kept with this CPU's ceilings; they must be there, as arithmetic comes off."""
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import new_peaks, save_peaks

    line = [sys.executable, "-m", "armillary.planning.calibration", str(home.cache)]
    try:
        ran = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ArmillaryError(f"a small engine did not answer within {TIMEOUT_S:g} s; armillary doctor looks at the "
                             "machine") from None  # fmt: skip
    if ran.returncode:
        said = ran.stderr.strip().splitlines()
        raise ArmillaryError(f"a small engine could not be run: {said[-1] if said else 'without a word'}; armillary "
                             "doctor looks at the machine")  # fmt: skip
    found = Calibration(**json.loads(ran.stdout.splitlines()[-1]))
    peaks = new_peaks(device_name("cpu")).with_points("calls", [{"what": "engine", "seconds": found.call_s}])
    save_peaks(home, peaks.with_points("process", [{"what": "engine", "resident_bytes": found.process_bytes}]))
    return found


# --- inside the process


def main() -> None:
    import armillary.serving.api.engine_main  # noqa: F401  # what an engine's process imports
    from armillary.machine.process import peak_resident_bytes

    replica, serve = small_replica(Home.at(sys.argv[1]))
    engine, end = _engine(serve), time.monotonic() + ENOUGH_S
    call_s = median(_call_s(engine, replica, rows, end) for rows in ROWS)
    found = Calibration(call_s=call_s, process_bytes=peak_resident_bytes() - _tensor_bytes(replica, serve))
    print(json.dumps(found.__dict__))


def small_replica(home: Home) -> tuple[Replica, Serve]:
    """The small model as the planner sees it, with what a server of it would be set to."""
    from armillary.machine.machine import here
    from armillary.planning.serving_choices import server_of
    from armillary.planning.serving_plan import serving_request
    from armillary.spec.recipe import recipe_from_dict

    length = PROMPT + 2 * LONG
    recipe = recipe_from_dict({
        "model": {"name": MODEL, "vocab": VOCAB},
        "serve": {"dtype": "fp32", "max_model_len": length, "kv_bytes": KV_BYTES, "max_running": max(ROWS),
                  "prefix_cache": False},
        "traffic": {"tokens_in": PROMPT, "tokens_out": LONG},
    })  # fmt: skip
    request = serving_request(recipe, recipe.model_config(), here(device="cpu"), home)
    return server_of(request, recipe.layout).replica, request.serve


def _engine(serve: Serve) -> Engine:
    import torch

    from armillary.model.transformer import build
    from armillary.serving.engine.make import make_engine
    from armillary.spec.catalogue import models

    config = replace(models()[MODEL].config, vocab=VOCAB)
    model = build(config, dtype=torch.float32, device="cpu", seed=0)
    return make_engine(model, None, serve, warm=False, owns_model=True)[0]


def _call_s(engine: Engine, replica: Replica, rows: int, end: float) -> float:
    """(a decode step − its arithmetic) / its calls."""
    times: dict[int, list[float]] = {SHORT: [], LONG: []}
    for number in range(TRIES):
        if number < 2 or time.monotonic() < end:
            for tokens, found in times.items():
                found.append(_answer_s(engine, rows, tokens))
    short, long = map(median, times.values())
    planned = replica.decode(rows, PROMPT + SHORT)
    step_s = max(0.0, long - short) / (LONG - SHORT)
    return max(0.1 * step_s, step_s - (planned.total_s - planned.host_s)) / replica.calls(rows)


def _answer_s(engine: Engine, rows: int, tokens: int) -> float:
    from armillary.serving.engine.params import SamplingParams
    from armillary.serving.engine.request import Request

    params = SamplingParams(max_tokens=tokens, temperature=0.7, ignore_eos=True, seed=1)
    prompts = [[(i * 31 + k * 7 + tokens) % VOCAB for k in range(PROMPT)] for i in range(rows)]
    asked = [Request(id=f"{rows}-{tokens}-{i}-{time.monotonic_ns()}", prompt=prompt, params=params)
             for i, prompt in enumerate(prompts)]  # fmt: skip
    time.sleep(REST_S)
    begin = time.perf_counter()
    engine.generate(asked, {})
    return time.perf_counter() - begin


def _tensor_bytes(replica: Replica, serve: Serve) -> float:
    """What the planner counts by itself."""
    from armillary.planning.serving_memory import step_bytes, weight_bytes

    return weight_bytes(replica) + KV_BYTES + step_bytes(replica, serve)


if __name__ == "__main__":
    main()
