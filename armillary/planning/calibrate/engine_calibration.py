"""Calibration of the planner with a small engine: CPU time per torch call, and memory of a process beside its tensors.

Small models spend most of a step outside their arithmetic: Python, dispatch, thread synchronisation, messages to the
server. Libraries differ by hundreds of megabytes between architectures and builds. Both differ too much between
machines to be constants, so a model is served as `armillary serve` does it, and the result is stored with the ceilings,
as kinds "calls" and "process".
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from armillary.errors import ArmillaryError, missing
from armillary.store.home import Home

if TYPE_CHECKING:
    from armillary.planning.serving.replica import Replica
    from armillary.serving.processes.engine_client import EngineClient
    from armillary.spec.tables.serve import Serve

MODEL, VOCAB = "armillary-5m", 4096
ROWS = (1, 1, 2, 1, 2, 1, 1, 2)
"""concurrent requests per run, each after a pause, as a server's caches are cold when a request comes. The lower
quartile of the results counts: other work on shared cores delays some runs and never speeds one up"""
PROMPT, TOKENS = 128, 24
"""tokens per request"""
PAUSE_S = 0.05
ENOUGH_S = 5.0
"""seconds of runs after which slow machines stop early"""
KV_BYTES = 16_000_000


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Result of a calibration."""

    call_s: float
    process_bytes: float | None
    """peak memory of the process beside weights, KV cache and activations; None where the system does not report it"""


def calibrate(home: Home, limit_s: float = 60.0) -> Calibration:
    """Measure within `limit_s` and store the result with this CPU's ceilings, which must exist."""
    from armillary.machine.device_name import device_name
    from armillary.store.peaks import new_peaks, save_peaks

    if find_spec("msgspec") is None:
        raise missing("msgspec", "an engine in its own process", "http")
    replica, serve = small_replica(home)
    with TemporaryDirectory(prefix="armillary-engine-") as folder:
        gaps, most = asyncio.run(_served(_saved(Path(folder)), serve, home, limit_s))
    result = Calibration(
        call_s=sorted(_call_s(replica, rows, gap_s) for rows, gap_s in gaps)[len(gaps) // 4],
        process_bytes=None if most is None else most - _tensor_bytes(replica, serve),
    )
    peaks = new_peaks(device_name("cpu")).with_points("calls", [{"what": "engine", "seconds": result.call_s}])
    if result.process_bytes is not None:
        peaks = peaks.with_points("process", [{"what": "engine", "resident_bytes": result.process_bytes}])
    save_peaks(home, peaks)
    return result


def small_replica(home: Home) -> tuple[Replica, Serve]:
    """The small model as the planner sees it, and the settings of its server, which leave one core free."""
    from armillary.machine.cores import compute_threads
    from armillary.machine.machine import here
    from armillary.planning.serving.deployment_options import server_of
    from armillary.planning.serving.serving_plan import serving_request
    from armillary.spec.recipe import recipe_from_dict

    recipe = recipe_from_dict(
        {
            "model": {"name": MODEL, "vocab": VOCAB},
            "serve": {
                "dtype": "fp32",
                "max_model_len": 2 * PROMPT,
                "kv_bytes": KV_BYTES,
                "max_running": max(ROWS),
                "prefix_cache": False,
                "threads": max(1, compute_threads() - 1),
            },
            "traffic": {"tokens_in": PROMPT, "tokens_out": TOKENS},
        }
    )
    request = serving_request(recipe, recipe.model_config(), here(device="cpu"), home, is_corrected=False)
    return server_of(request, recipe.layout).replica, request.serve


def _saved(folder: Path) -> Path:
    """The small model with random weights, on disk."""
    import torch

    from armillary.model.transformer import build
    from armillary.model.weights.hf_weights import save_model
    from armillary.spec.catalogue import models

    config = replace(models()[MODEL].config, vocab=VOCAB)
    return save_model(build(config, dtype=torch.float32, device="cpu", seed=0), folder / "model")


def _call_s(replica: Replica, rows: int, gap_s: float) -> float:
    """(inter-token latency − a step's arithmetic) / calls per step."""
    planned = replica.decode(rows, PROMPT + TOKENS // 2)
    return max(0.1 * gap_s, gap_s - (planned.total_s - planned.host_s)) / replica.calls(rows)


def _tensor_bytes(replica: Replica, serve: Serve) -> float:
    """Bytes of the tensors, as the planner counts them."""
    from armillary.planning.serving.serving_memory import step_bytes, weight_bytes

    return weight_bytes(replica) + KV_BYTES + step_bytes(replica, serve)


# --- measuring a served engine


async def _served(
    model: Path, serve: Serve, home: Home, limit_s: float
) -> tuple[list[tuple[int, float]], float | None]:
    """([(concurrent requests, median inter-token latency), …], peak memory of the engine's process)."""
    from armillary.machine.memory import peak_of
    from armillary.serving.processes.engine_client import EngineClient
    from armillary.serving.processes.engine_ipc import EngineConfig
    from armillary.serving.processes.server_metrics import Metrics

    config = EngineConfig(
        model=str(model), serve=serve, home=home, device="cpu", gauges=model.with_name("gauges.jsonl")
    )
    engine, gaps = EngineClient(config, ranks=1, metrics=Metrics(), say=lambda line: None), []
    try:
        async with asyncio.timeout(max(1.0, limit_s)):
            await engine.start()
            await _gap_s(engine, 1)
            end = time.monotonic() + ENOUGH_S
            for number, rows in enumerate(ROWS):
                if number < 2 or time.monotonic() < end:
                    gaps.append((rows, await _gap_s(engine, rows)))
        return gaps, None if engine.pid is None else peak_of(engine.pid)
    except TimeoutError:
        raise ArmillaryError(
            f"a small engine did not respond within {limit_s:.0f} s; armillary doctor checks the machine"
        ) from None
    finally:
        await engine.stop()


async def _gap_s(engine: EngineClient, rows: int) -> float:
    """Median time between tokens of `rows` concurrent requests."""
    from armillary.engine.request.sampling_params import SamplingParams
    from armillary.serving.processes.request_mailbox import Mailbox

    await asyncio.sleep(PAUSE_S)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.7, ignore_eos=True, seed=1)
    box = Mailbox(rows, eager=True)
    for row in range(rows):
        engine.submit([(row * 31 + at * 7) % VOCAB for at in range(PROMPT)], params, box, row)
    last: dict[int, float] = {}
    gaps = []
    while box.left:
        for event in await box.take():
            now = time.perf_counter()
            if event.token is not None and event.choice in last:
                gaps.append(now - last[event.choice])
            last[event.choice] = now
    if not gaps:
        raise ArmillaryError("a small engine returned no tokens; armillary doctor checks the machine")
    return median(gaps)
