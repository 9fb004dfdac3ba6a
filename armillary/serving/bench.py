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
from armillary.spec.service import Serve
from armillary.units import bandwidth_text, seconds_text

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
    together: int
    """requests of a batch at most"""
    modes: tuple[Served, ...]
    """the same requests, batched in different ways"""

    @property
    def single_tokens_per_s(self) -> float:
        """After the first."""
        return (self.single.tokens_out - 1) / max(1e-9, self.single.seconds - self.single.ttft_p50_s)


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
    found = []
    for mode in modes:
        watch(f"batching {mode}")
        engine, _ = make_engine(model, None, replace(serve, batching=mode), seed=0)  # type: ignore[arg-type]
        load = ragged(requests, most_in=tokens_in, most_out=tokens_out, vocab=config.vocab)
        found.append(serve_all(engine, load, name=mode))
    made = ServeBench(
        model=config.name, device=weight.device.type, dtype=str(weight.dtype).removeprefix("torch."), single=single,
        single_bytes_per_s=0.0, together=serve.max_running, modes=tuple(found),
    )  # fmt: skip
    token_bytes = decode_bytes(model, tokens_in + tokens_out / 2)
    return replace(made, single_bytes_per_s=made.single_tokens_per_s * token_bytes)


def _single(model: Transformer, serve: Serve, tokens_in: int, tokens_out: int) -> Served:
    engine, _ = make_engine(model, None, replace(serve, max_running=1, prefix_cache=False), seed=0)
    vocab = model.config.vocab
    serve_all(engine, fixed(1, tokens_in=2, tokens_out=2, vocab=vocab, name="warm"))
    return serve_all(engine, fixed(1, tokens_in=tokens_in, tokens_out=tokens_out, vocab=vocab), name="single")


def bench_page(bench: ServeBench) -> str:
    """The single stream in a sentence, and bars of tokens a second by batching mode with the gaps between tokens, on
    one page that needs nothing else."""
    most = max((served.tokens_per_s for served in bench.modes), default=1.0)
    bars = "".join(_bar(served, most) for served in bench.modes)
    style = ("body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:44em;padding:0 1em}h1{font-size:1.4em}"
             ".bar{background:#2f6fd0;height:1.1em;border-radius:2px}.dim{color:#556;margin:0 0 1em}")  # fmt: skip
    title = f"{escape(bench.model)} on {escape(bench.device)}, {escape(bench.dtype)}"
    return (f"<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
            f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"
            f"<p>A single stream: {bench.single.tokens_in} tokens in {seconds_text(bench.single.ttft_p50_s)}, then "
            f"{bench.single_tokens_per_s:,.1f} tokens/s = {bandwidth_text(bench.single_bytes_per_s)}.</p>"
            f"<p>The same requests, all there at once, {bench.together} together at most, by batching mode:</p>"
            f"{bars}</html>\n")  # fmt: skip


def _bar(served: Served, most: float) -> str:
    gaps = f"ITL p50 {seconds_text(served.itl_p50_s)}, p99 {seconds_text(served.itl_p99_s)}"
    first = f"TTFT p50 {seconds_text(served.ttft_p50_s)}, p99 {seconds_text(served.ttft_p99_s)}"
    return (f"<div><b>{escape(served.name)}</b> {served.tokens_per_s:,.0f} tokens/s</div>"
            f"<div class='bar' style='width:{100 * served.tokens_per_s / most:.1f}%'></div>"
            f"<div class='dim'>{gaps} · {first}</div>")  # fmt: skip
