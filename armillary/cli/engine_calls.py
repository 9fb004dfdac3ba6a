"""What a call of torch costs an engine step on this CPU, by steps of a small model in the real engine.

Small models spend most of a step outside their arithmetic: Python, dispatch, threads that meet. How much that is
differs between CPUs by more than their clocks do, so it is timed, and kept beside the ceilings as kind "calls".
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.planning.replica import Replica
    from armillary.serving.engine.engine import Engine

MODEL, VOCAB = "armillary-5m", 4096
ROWS = (1, 4)
"""requests decoded together"""
PROMPT, TOKENS = 32, 16
"""of each of them"""


def measure_engine_calls(home: Home) -> float:
    """Seconds of a call, kept with this CPU's ceilings; they must be there, as the arithmetic comes off by them."""
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import new_peaks, save_peaks

    replica, engine = _replica(home), _engine()
    found = sum(_call_s(engine, replica, rows) for rows in ROWS) / len(ROWS)
    save_peaks(home, new_peaks(device_name("cpu")).with_points("calls", [{"what": "engine", "seconds": found}]))
    return found


def _engine() -> Engine:
    import torch

    from armillary.model.transformer import build
    from armillary.serving.engine.make import make_engine
    from armillary.spec.catalogue import models
    from armillary.spec.service import Serve

    config = replace(models()[MODEL].config, vocab=VOCAB)
    model = build(config, dtype=torch.float32, device="cpu", seed=0)
    serve = Serve(max_model_len=PROMPT + 4 * TOKENS, kv_bytes=16_000_000, max_running=max(ROWS), dtype="fp32")
    return make_engine(model, None, serve, warm=False)[0]


def _replica(home: Home) -> Replica:
    """The same as the planner sees it."""
    from armillary.machine.machine import here
    from armillary.planning.serving_choices import server_of
    from armillary.planning.serving_plan import serving_request
    from armillary.spec.recipe import recipe_from_dict

    recipe = recipe_from_dict({"model": {"name": MODEL, "vocab": VOCAB}, "serve": {"dtype": "fp32"},
                               "traffic": {"tokens_in": PROMPT, "tokens_out": TOKENS}})  # fmt: skip
    request = serving_request(recipe, recipe.model_config(), here(device="cpu"), home)
    return server_of(request, recipe.layout).replica


def _call_s(engine: Engine, replica: Replica, rows: int) -> float:
    """(a decode step − its arithmetic) / its calls; the step by answers of two lengths, so that prompts come off."""
    short, long = (min(_answer_s(engine, rows, tokens) for _ in range(2)) for tokens in (TOKENS, 3 * TOKENS))
    planned = replica.decode(rows, PROMPT + TOKENS)
    step_s = max(0.0, long - short) / (2 * TOKENS)
    return max(0.1 * step_s, step_s - (planned.total_s - planned.host_s)) / replica.calls(rows)


def _answer_s(engine: Engine, rows: int, tokens: int) -> float:
    from armillary.serving.engine.params import SamplingParams
    from armillary.serving.engine.request import Request

    params = SamplingParams(max_tokens=tokens, temperature=0.7, ignore_eos=True, seed=1)
    prompts = [[(i * 31 + k * 7 + tokens) % VOCAB for k in range(PROMPT)] for i in range(rows)]
    asked = [Request(id=f"{rows}-{tokens}-{i}-{time.monotonic_ns()}", prompt=prompt, params=params)
             for i, prompt in enumerate(prompts)]  # fmt: skip
    begin = time.perf_counter()
    engine.generate(asked, {})
    return time.perf_counter() - begin
