"""The engine on one GPU: the nano-vllm benchmark, a single stream, and streams beside long prompts.

    python -m benchmarks.engine_gpu [--case throughput single mixed graphs slowdowns] [--model NAME] [--explain]

Real shapes with random weights in bf16. Peers' figures on the same chip are printed beside (benchmarks/ says where they
are from); bytes a second are held against the read bandwidth measured in the same run. Each case stops by itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from armillary.engine.bench.measure import Watch, decode_terms, fixed, nano_vllm, serve_all
from armillary.engine.engine import Engine
from armillary.model.transformer import Transformer
from armillary.spec.tables.serve import Serve
from benchmarks.engine_mixed_load import mixed, slowdowns
from benchmarks.engine_setup import drawn, read_bandwidth, started, wait
from benchmarks.engine_times import StepTimes, top_kernels

PEERS = {
    "qwen3-0.6b": {
        "nano-vllm, measured": 15_800,
        "nano-vllm, published": 19_638,
        "mini-sglang, published": 20_711,
        "bar": 25_000,
        "byte and FLOP limit": 36_000,
    },
    "qwen3-8b": {"nano-vllm, measured": 7_900, "bar": 9_500, "byte and FLOP limit": 12_300},
}
SINGLE = {
    "qwen3-8b": {"nano-vllm": 169, "bar, of read bandwidth": 0.85},
    "tinyllama-1.1b": {"gpt-fast": 653, "bar, of read bandwidth": 0.65},
}


def throughput(model: Transformer, args: Any) -> dict[str, Any]:
    """256 requests (or as many as told) at once, 100 to 1,024 tokens in and out."""
    longest = 4096 if not args.tiny else 64
    engine, phases = started(
        model,
        Serve(
            max_model_len=longest,
            max_running=args.requests if not args.tiny else 8,
            max_tokens_per_step=args.step_tokens,
            overlap=not args.no_overlap,
            kv_bytes=args.kv_bytes,
            memory_fraction=args.memory_fraction,
            graphs=not args.no_graphs,
        ),
    )
    requests = nano_vllm(args.requests) if not args.tiny else nano_vllm(12, least=3, most=20, vocab=100)
    serve_all(engine, fixed(2, tokens_in=8, tokens_out=4, vocab=100, name="warm"))
    gc.collect()
    gc.freeze()
    found = serve_all(engine, requests, limit_s=args.limit_s)
    gc.unfreeze()
    peers = PEERS.get(args.model, {})
    ratios = {name: round(found.tokens_per_s / value, 3) for name, value in peers.items()}
    made = {"tokens_per_s": round(found.tokens_per_s), "of": ratios, "start_s": phases} | _rounded(asdict(found))
    made["kv_tokens"] = engine.scheduler.cache.num_blocks * engine.scheduler.cache.block_tokens
    return made | (_explained(engine, args) if args.explain else {})


def _explained(engine: Engine, args: Any) -> dict[str, Any]:
    """The same requests again until a tenth is over: the parts of a step, and the kernels of one that decodes."""
    times, watch = StepTimes(engine), Watch(engine)
    requests = nano_vllm(args.requests) if not args.tiny else nano_vllm(12, least=8, most=40, vocab=100)
    for request in requests:
        watch.submit(replace(request, id=f"e{request.id}", prompt=request.prompt[::-1]))
    while engine.scheduler.request_table.waiting or len(engine.scheduler.request_table.running) > 0.9 * len(requests):
        watch.step()
    running, kernels = engine.scheduler.request_table.running, {}
    if args.device == "cuda":
        name = f"{len(running)} rows, {sum(seq.length for seq in running)} tokens"
        kernels[name] = top_kernels(watch.step, 8)
    watch.abort_all()
    while engine.busy:
        watch.step()
    return {"kernels": kernels} | times.text()


def _rounded(found: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


def single(model: Transformer, args: Any) -> dict[str, Any]:
    """One request, 128 in, 256 out: bytes a second against the read bandwidth."""
    tokens_in, tokens_out = (128, 256) if not args.tiny else (8, 16)
    engine, phases = started(
        model,
        Serve(
            max_model_len=1024 if not args.tiny else 64,
            max_running=1,
            max_tokens_per_step=128,
            kv_bytes=args.kv_bytes,
            graphs=not args.no_graphs,
        ),
    )
    best: dict[str, Any] = {"tokens_per_s": 0.0}
    for turn in range(3):
        found = serve_all(engine, fixed(1, tokens_in=tokens_in, tokens_out=tokens_out, vocab=100, name=f"t{turn}-"))
        decode_s = found.seconds - found.ttft_p50_s
        rate = (tokens_out - 1) / decode_s
        if rate > best["tokens_per_s"]:
            terms = decode_terms(model, tokens_in + tokens_out / 2)
            moved = sum(terms.values()) * rate
            best = {
                "tokens_per_s": rate,
                "limit_tokens_per_s": args.read / sum(terms.values()),
                "of_limit": moved / args.read,
                "bytes_per_token": {name: round(value) for name, value in terms.items()},
                "bytes_per_s": moved,
                "of_read_bandwidth": moved / args.read,
                "ttft_s": found.ttft_p50_s,
            }
    if args.explain:
        best |= _explained_single(engine, args, tokens_in, tokens_out)
    return _rounded(best) | {"peers": SINGLE.get(args.model, {}), "start_s": phases}


def _explained_single(engine: Engine, args: Any, tokens_in: int, tokens_out: int) -> dict[str, Any]:
    times, watch = StepTimes(engine), Watch(engine)
    watch.submit(fixed(1, tokens_in=tokens_in, tokens_out=tokens_out, vocab=90, name="e")[0])
    for _ in range(tokens_out // 2):
        watch.step()
    found = times.text()
    if args.device == "cuda":
        found["kernels"] = top_kernels(watch.step, 8)
    watch.abort_all()
    while engine.busy:
        watch.step()
    return found


def graphs(model: Transformer, args: Any) -> dict[str, Any]:
    """Graphs on and off give the same tokens, drawn and greedy."""
    found = []
    for on in (True, False):
        serve = Serve(
            max_model_len=256 if not args.tiny else 64,
            max_running=16,
            max_tokens_per_step=256,
            kv_bytes=args.kv_bytes,
            graphs=on,
        )
        engine, _ = started(model, serve)
        if not on:  # the same padding, so that products have the same sizes
            engine.loop.executor.encoder.fit = found[0][1].encoder.fit  # type: ignore[attr-defined]
        requests = fixed(16, tokens_in=24, tokens_out=32, vocab=100, temperature=0.8)
        tokens = [made.tokens for made in engine.generate(requests)]
        found.append((tokens, engine.loop.executor))
    return {"equal": found[0][0] == found[1][0]}


CASES: dict[str, Callable[[Transformer, Any], dict[str, Any]]] = {
    "throughput": throughput,
    "single": single,
    "mixed": mixed,
    "graphs": graphs,
    "slowdowns": slowdowns,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=["throughput", "single", "mixed", "graphs"], choices=list(CASES))
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--requests", type=int, default=256, help="throughput: all at once")
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--prefill-tokens", type=int, help="mixed: prompt tokens a step beside streams at most")
    parser.add_argument("--slowdown", type=float, default=2.0, help="mixed: a step over what its decodes take alone")
    parser.add_argument("--prompts", type=int, default=2, help="mixed: long prompts one after the other")
    parser.add_argument("--layers", type=int, help="fewer than the model has: to see that it runs")
    parser.add_argument("--kv-bytes", type=int, help="of the KV cache; what is free unless given")
    parser.add_argument("--memory-fraction", type=float, help="throughput: of the GPU's memory")
    parser.add_argument("--limit-s", type=float, default=120.0)
    parser.add_argument("--explain", action="store_true", help="parts of steps and kernels, in a run of their own")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, to see that it runs")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin = time.monotonic()
    model = drawn(args.model, args.device, torch.bfloat16 if args.device == "cuda" else torch.float32, args.layers)
    args.read = read_bandwidth(args.device)
    wait(args.device)
    found: dict[str, Any] = {
        "model": args.model,
        "read_bytes_per_s": args.read,
        "weights_s": round(time.monotonic() - begin, 2),
    }
    for name in args.case:
        try:
            found[name] = CASES[name](model, args)
        except Exception as error:  # one case that fails must not cost the others their figures
            found[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            traceback.print_exc(file=sys.stderr)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(json.dumps({name: found[name]}, default=str), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
