"""Benchmark of the engine (`bench serve`): offline throughput by batching mode, and latency of a single stream."""

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any

from armillary.engine.bench.measure import Served, decode_bytes, fixed, ragged, serve_all, serve_bursts
from armillary.engine.build import make_engine
from armillary.model.transformer import Transformer
from armillary.spec.tables.serve import Serve
from armillary.store.peaks import Peaks

MODES = ("none", "static", "dynamic", "continuous")
_BURST = 3


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """Results of the benchmark."""

    model: str
    device: str
    dtype: str
    single: Served
    """one request at a time, greedy"""
    single_bytes_per_s: float
    """bytes per second of weights and keys read by single-stream decoding"""
    max_running: int
    burst: int
    modes: tuple[Served, ...]
    """the same requests by batching mode"""


@dataclass(kw_only=True)
class Notes:
    """Records in memory: no file is written during the measurement."""

    records: list[tuple[float, Mapping[str, Any], int | None, str | None]] = field(default_factory=list)
    """unix seconds, gauges, and their step or request"""

    def record(self, gauges: Mapping[str, Any], *, step: int | None = None, request: str | None = None) -> None:
        self.records.append((time.time(), gauges, step, request))

    def forget_warm_up(self) -> None:
        """Drop steps and requests so far; calibration records stay."""
        self.records = [record for record in self.records if record[2] is None and record[3] is None]


def bench_serve(
    model: Transformer,
    serve: Serve,
    *,
    modes: Items[str] = MODES,
    requests: int = 32,
    tokens_in: int = 128,
    tokens_out: int = 64,
    watch: Callable[[str], None] = lambda name: None,
    on_records: Callable[[str, Notes], None] | None = None,
    peaks: Peaks | None = None,
) -> ServeBench:
    """A single stream, then the same ragged requests once for each batching mode.

    Requests come in bursts of three times the batch size, the first a moment ahead, as from a program that sends
    several requests and continues when all are complete. So the modes differ systematically: static batching runs the
    first request alone; dynamic batching waits and fills its batches; continuous batching admits requests as others
    end, so no batch waits for its longest sequence. `on_records` gets the records of each mode."""
    config, weight = model.config, next(model.parameters())
    longest = min(config.context, serve.max_model_len or tokens_in + tokens_out)
    serve = replace(serve, max_model_len=longest)
    watch("single stream")
    single = _single(model, serve, tokens_in, tokens_out)
    runs = []
    for mode in modes:
        watch(f"batching {mode}")
        notes, setting = Notes(), replace(serve, batching=mode)  # type: ignore[arg-type]
        engine, _ = make_engine(model, None, setting, seed=0, record=notes.record if on_records else None, peaks=peaks)
        serve_all(engine, fixed(serve.max_running, tokens_in=tokens_in, tokens_out=4, vocab=config.vocab, name="warm"))
        notes.forget_warm_up()
        load = ragged(requests, most_in=tokens_in, most_out=tokens_out, vocab=config.vocab)
        runs.append(serve_bursts(engine, load, _BURST * serve.max_running, name=mode))
        if on_records is not None:
            on_records(mode, notes)
    return ServeBench(
        model=config.name,
        device=weight.device.type,
        dtype=str(weight.dtype).removeprefix("torch."),
        single=single,
        single_bytes_per_s=single.decode_tokens_per_s * decode_bytes(model, tokens_in + tokens_out / 2),
        max_running=serve.max_running,
        burst=_BURST * serve.max_running,
        modes=tuple(runs),
    )


def _single(model: Transformer, serve: Serve, tokens_in: int, tokens_out: int) -> Served:
    alone = replace(serve, max_running=1, prefix_cache=False, batching="continuous")
    engine, _ = make_engine(model, None, alone, seed=0)
    vocab = model.config.vocab
    serve_all(engine, fixed(1, tokens_in=2, tokens_out=2, vocab=vocab, name="warm"))
    return serve_all(engine, fixed(1, tokens_in=tokens_in, tokens_out=tokens_out, vocab=vocab), name="single")
