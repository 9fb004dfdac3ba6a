"""Streams beside long prompts, a part of `engine_gpu`: gaps between tokens, and the speed of prompts."""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch

from armillary.engine.bench.measure import Watch, fixed
from armillary.model.transformer import Transformer
from armillary.spec.tables.serve import Serve
from armillary.stats import percentile
from benchmarks.engine_setup import started
from benchmarks.engine_times import StepTimes, top_kernels


def mixed(model: Transformer, args: Any) -> dict[str, Any]:
    """32k-token prompts alone; 32 streams at 1k context alone, and beside such a prompt that is always in prefill."""
    streams, context, long = (32, 1024, 32_768) if not args.tiny else (3, 8, 24)
    longest = max(long + 8, context + 4000) if not args.tiny else 64
    engine, phases = started(
        model,
        Serve(
            max_model_len=min(longest, model.config.context),
            max_running=streams + 2,
            max_tokens_per_step=args.step_tokens,
            prefill_tokens=args.prefill_tokens,
            prefill_slowdown=args.slowdown,
            prefix_cache=False,
            kv_bytes=args.kv_bytes,
            graphs=not args.no_graphs,
        ),
    )
    watch, grow = Watch(engine), 110 * args.prompts if not args.tiny else 0
    gc.collect()
    gc.freeze()  # as a server does
    prompts = iter(fixed(64, tokens_in=min(long, model.config.context - 8), tokens_out=1, vocab=100, name="long"))
    alone = _prefill(watch, prompts, args.prompts)
    _stream(watch, streams, context - grow // 4, min(longest, model.config.context))
    for _ in range(max(5, grow // 2)):  # they grow to as much more than the context as they began with less
        watch.step()
    quiet = percentile(watch.gaps, 50)
    watch.abort_all()
    _stream(watch, streams, context - grow, min(longest, model.config.context))
    times = StepTimes(engine)
    beside = _prefill(watch, prompts, args.prompts)
    p50, p99 = percentile(watch.gaps, 50), percentile(watch.gaps, 99)
    gc.unfreeze()
    spread = {f"p{at}": round(1000 * percentile(watch.gaps, at), 2) for at in (5, 25, 50, 75, 90, 95, 98, 99, 100)}
    kernels = _explained_mixed(watch, prompts) if args.explain and args.device == "cuda" else {}
    watch.abort_all()
    return (
        times.text()
        | kernels
        | {
            "itl_ms": spread,
            "itl_alone_p50_s": quiet,
            "itl_p50_s": p50,
            "itl_p99_s": p99,
            "itl_p99_over_alone_p50": p99 / quiet,
            "prefill_alone_tokens_per_s": alone,
            "prefill_tokens_per_s": beside,
            "prefill_share": beside / alone,
            "bars": {"itl_p99_over_alone_p50": 2.0, "prefill_share": 0.6},
            "start_s": phases,
        }
    )


def slowdowns(model: Transformer, args: Any) -> dict[str, Any]:
    """The mixed case at several values of prefill_slowdown, the last none: gaps against the speed of prompts."""
    found = {}
    for value in (1.5, 2.0, 3.0, 4.0, None):
        made = mixed(model, argparse.Namespace(**vars(args) | {"slowdown": value, "explain": False}))
        kept = ("itl_alone_p50_s", "itl_p50_s", "itl_p99_s", "itl_p99_over_alone_p50", "prefill_share")
        found[str(value)] = {name: round(made[name], 6) for name in kept}
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return found


def _stream(watch: Watch, count: int, context: int, longest: int) -> None:
    """Streams that decode without end, their prompts computed."""
    for request in fixed(count, tokens_in=context, tokens_out=longest - context - 2, vocab=100, name=f"s{context}-"):
        watch.submit(request)
    request_table = watch.engine.scheduler.request_table
    while request_table.waiting or any(seq.is_prefilling for seq in request_table.running):
        watch.step()
    watch.clear()


def _explained_mixed(watch: Watch, prompts: Any) -> dict[str, Any]:
    """Kernels of streams alone, then beside a prompt half of which is computed."""
    found = {"streams alone": top_kernels(watch.step, 8)}
    watch.submit(request := next(prompts))
    request_table = watch.engine.scheduler.request_table
    while not any(seq.request is request and 2 * seq.computed > seq.length for seq in request_table.running):
        watch.step()
    return found | {"beside": top_kernels(watch.step, 4)}


def _prefill(watch: Watch, prompts: Any, count: int) -> float:
    """Prompt tokens a second while there is always a long one: the next waits while one is computed."""
    begin = time.monotonic()
    wanted = [next(prompts) for _ in range(count)]
    left = {request.id for request in wanted}
    for request in wanted:
        watch.submit(request)
    while left:
        left -= {piece.sequence.request.id for piece in watch.step() if piece.finish is not None}
    return sum(len(request.prompt) for request in wanted) / (time.monotonic() - begin)
