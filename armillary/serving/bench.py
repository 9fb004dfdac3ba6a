"""`bench serve` as a library: offline throughput by batching mode, and the latency of a single stream."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from html import escape

from armillary.model.transformer import Transformer
from armillary.serving.engine.make import make_engine
from armillary.serving.measure import Served, decode_bytes, serve_all
from armillary.serving.workload import fixed, ragged
from armillary.spec.job import Serve

MODES = ("none", "static", "dynamic", "continuous")


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    """What an engine reached."""

    model: str
    """name of the shape"""
    device: str
    """cpu, cuda …"""
    dtype: str
    """of the weights"""
    single: Served
    """one request at a time, greedy"""
    single_bytes_per_s: float
    """weights and keys that decoding one token read, a second"""
    modes: tuple[Served, ...]
    """the same requests, batched in different ways"""


def bench_serve(
    model: Transformer, serve: Serve, *, modes: Items[str] = MODES, requests: int = 32, tokens_in: int = 128,
    tokens_out: int = 64, watch: Callable[[str], None] = lambda name: None,
) -> ServeBench:  # fmt: skip
    """A single stream, then the same ragged requests once for each batching mode."""
    config, weight = model.config, next(model.parameters())
    longest = min(config.context, serve.max_model_len or tokens_in + tokens_out)
    serve = replace(serve, max_model_len=longest)
    watch("single stream")
    single = _single(model, serve, tokens_in, tokens_out)
    rate = (single.tokens_out - 1) / max(1e-9, single.seconds - single.ttft_p50_s)
    found = []
    for mode in modes:
        watch(f"batching {mode}")
        engine, _ = make_engine(model, None, replace(serve, batching=mode), seed=0)  # type: ignore[arg-type]
        load = ragged(requests, most_in=tokens_in, most_out=tokens_out, vocab=config.vocab)
        found.append(serve_all(engine, load, name=mode))
    return ServeBench(
        model=config.name, device=weight.device.type, dtype=str(weight.dtype).removeprefix("torch."), single=single,
        single_bytes_per_s=rate * decode_bytes(model, tokens_in + tokens_out / 2), modes=tuple(found),
    )  # fmt: skip


def _single(model: Transformer, serve: Serve, tokens_in: int, tokens_out: int) -> Served:
    engine, _ = make_engine(model, None, replace(serve, max_running=1, prefix_cache=False), seed=0)
    vocab = model.config.vocab
    serve_all(engine, fixed(1, tokens_in=2, tokens_out=2, vocab=vocab, name="warm"))
    return serve_all(engine, fixed(1, tokens_in=tokens_in, tokens_out=tokens_out, vocab=vocab), name="single")


def bench_page(bench: ServeBench) -> str:
    """Bars of tokens a second by batching mode, and the gaps between tokens, on one page that needs nothing else."""
    most = max((served.tokens_per_s for served in bench.modes), default=1.0)
    rows = []
    for i, served in enumerate(bench.modes):
        y, width = 30 + 46 * i, 560 * served.tokens_per_s / most
        text = (f"{served.tokens_per_s:,.0f} tokens/s · ITL p50 {served.itl_p50_s * 1e3:.1f} ms, p99 "
                f"{served.itl_p99_s * 1e3:.1f} ms · TTFT p50 {served.ttft_p50_s * 1e3:.0f} ms")  # fmt: skip
        bar = f"<rect x='110' y='{y - 13}' height='18' width='{width:.0f}' fill='#2f6fd0'/>"
        note = f"<text x='110' y='{y + 20}' class='dim'>{text}</text>"
        rows.append(f"<text x='0' y='{y}'>{escape(served.name)}</text>{bar}{note}")
    style = ("body{font:14px system-ui,sans-serif;margin:2em}svg{max-width:100%;font:12px system-ui,sans-serif}"
             ".dim{fill:#667}")  # fmt: skip
    title = f"{escape(bench.model)} on {escape(bench.device)}, {escape(bench.dtype)}"
    return (f"<!doctype html><meta charset='utf-8'><title>{title}</title><style>{style}</style><h1>{title}</h1>"
            f"<p>The same requests, all there at once, by batching mode.</p>"
            f"<svg viewBox='0 0 900 {40 + 46 * len(rows)}'>{''.join(rows)}</svg>\n")  # fmt: skip
