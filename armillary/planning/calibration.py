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
TIMEOUT_S = 60.0
KV_BYTES = 16_000_000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What the process found."""

    call_s: float
    """a torch call in an engine step"""
    serving_bytes: float
    """an engine's process beside weights, KV cache and working memory"""
    training_bytes: float
    """a trainer's process that imports everything, at its most"""


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
    sizes = [{"what": "training", "resident_bytes": found.training_bytes},
             {"what": "serving", "resident_bytes": found.serving_bytes}]  # fmt: skip
    save_peaks(home, peaks.with_points("process", sizes))
    return found


# --- inside the process


def main() -> None:
    import armillary.serving.api.engine_main  # what an engine imports
    from armillary.machine.process import peak_resident_bytes, resident_bytes

    home, imported = Home.at(sys.argv[1]), peak_resident_bytes()
    replica, serve = small_replica(home)
    engine = _engine(serve)
    call_s = median(_call_s(engine, replica, rows) for rows in ROWS)
    serving_bytes, before = peak_resident_bytes() - _tensor_bytes(replica, serve), resident_bytes()
    import armillary.training.start  # noqa: F401  # and what a trainer imports besides

    found = Calibration(call_s=call_s, serving_bytes=serving_bytes,
                        training_bytes=imported + resident_bytes() - before)  # fmt: skip
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


def _call_s(engine: Engine, replica: Replica, rows: int) -> float:
    """(a decode step − its arithmetic) / its calls."""
    short, long = (median(_answer_s(engine, rows, tokens) for _ in range(TRIES)) for tokens in (SHORT, LONG))
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
