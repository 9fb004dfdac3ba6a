"""Throughput and latency of an engine (tokens per second, TTFT, inter-token latency, bytes per decode step), and the
requests to measure it with: random tokens, fixed or random lengths, from a seed."""

import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from random import Random

from armillary.engine.engine import Engine
from armillary.engine.output.output_text import OutputDelta
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadInput
from armillary.kernels.moe.moe import touched_experts
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.transformer import Transformer
from armillary.spec.arithmetic.params import state_bytes
from armillary.stats import percentile


@dataclass(frozen=True, kw_only=True)
class Served:
    """Results of one run."""

    name: str
    requests: int
    tokens_in: int
    tokens_out: int
    seconds: float
    """from the first request to the last token"""
    steps: int
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    schedule_s: float
    preempted: int

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return self.tokens_out / self.seconds

    @property
    def decode_tokens_per_s(self) -> float:
        """Of a single stream: output tokens per second after the first."""
        return (self.tokens_out - 1) / max(1e-9, self.seconds - self.ttft_p50_s)


def serve_all(engine: Engine, requests: Iterable[Request], *, name: str = "", limit_s: float = 600.0) -> Served:
    """Serve `requests`; BadInput where one could not be served."""
    watch = Watch(engine)
    begin = time.monotonic()
    for request in requests:
        watch.submit(request)
    while engine.busy:
        watch.step()
        if time.monotonic() - begin > limit_s:
            watch.abort_all()
    return watch.served(name, time.monotonic() - begin)


def serve_bursts(engine: Engine, requests: Items[Request], size: int, *, name: str = "") -> Served:
    """Serve `requests` in bursts of `size`, each after the answers to the one before: the first of a burst is a step
    ahead of the others."""
    watch = Watch(engine)
    begin = time.monotonic()
    for at in range(0, len(requests), size):
        first, *rest = requests[at : at + size]
        watch.submit(first)
        watch.step()
        for request in rest:
            watch.submit(request)
        while engine.busy:
            watch.step()
    return watch.served(name, time.monotonic() - begin)


class Watch:
    """Counts the output of an engine since `clear`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.clear()

    def clear(self) -> None:
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self.decided: list[float] = []
        self.tokens_in = self.tokens_out = self.finished = 0
        self._preempted = self.engine.scheduler.totals.preempted

    def submit(self, request: Request) -> None:
        self.engine.scheduler.submit(request, self.engine.loop.clock())

    def abort_all(self) -> None:
        for request_id in list(self.engine.scheduler.request_table.requests):
            self.engine.abort(request_id)

    def step(self) -> list[OutputDelta]:
        scheduler, before = self.engine.scheduler, self.engine.scheduler.totals.tokens_out
        deltas = self.engine.step()
        if scheduler.request_table.running or scheduler.under_way or scheduler.totals.tokens_out > before:
            self.decided.append(self.engine.loop.schedule_s)
        else:
            time.sleep(0.001)  # a dynamic batch waits for its window
        for delta in deltas:
            self._add(delta)
        return deltas

    def _add(self, delta: OutputDelta) -> None:
        if delta.error:
            raise BadInput(f"{delta.sequence.id}: {delta.error}")
        seq = delta.sequence
        self.tokens_out += len(delta.tokens)
        if delta.gap_s is not None:
            self.gaps.append(delta.gap_s)
        elif delta.tokens:
            assert seq.first_token_at is not None
            self.firsts.append(seq.first_token_at - seq.arrived_at)
            self.tokens_in += seq.num_prompt
        self.finished += delta.finish in ("stop", "length")

    def served(self, name: str, seconds: float) -> Served:
        return Served(
            name=name,
            requests=self.finished,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            seconds=seconds,
            steps=len(self.decided),
            ttft_p50_s=percentile(self.firsts, 50),
            ttft_p99_s=percentile(self.firsts, 99),
            itl_p50_s=percentile(self.gaps, 50),
            itl_p99_s=percentile(self.gaps, 99),
            schedule_s=sum(self.decided) / max(1, len(self.decided)),
            preempted=self.engine.scheduler.totals.preempted - self._preempted,
        )


def decode_bytes(model: Transformer, context: float, *, batch: int = 1) -> float:
    """Bytes that a decode step reads, at least."""
    return sum(decode_terms(model, context, batch=batch).values())


def decode_terms(model: Transformer, context: float, *, batch: int = 1) -> dict[str, float]:
    """The same by what is read: all weights but the input embedding, and keys and values of the context; layers with a
    window or chunk read that. Of routed experts, those that random tokens would choose."""
    config = model.config
    moe, size = config.moe, next(model.parameters()).element_size()
    chosen = touched_experts(batch, moe.num_experts, moe.top_k) / moe.num_experts if moe is not None else 1.0
    terms = dict.fromkeys(("attention", "mlp", "experts", "head", "other", "kv_cache"), 0.0)
    for name, num_bytes in _weight_bytes(model):
        if config.tied or not name.startswith("embedding."):
            terms[_part(name)] += num_bytes * (chosen if ".experts." in name else 1.0)
    limited = [layer.attention in ("sliding", "chunked") and config.window for layer in config.layers]
    seen = sum(min(context, window) if window else context for window in limited)
    seen -= context * config.num_recurrent_layers
    mla = config.mla
    cached = 2 * config.kv_heads * config.head_dim if mla is None else mla.kv_rank + mla.rope_dim
    terms["kv_cache"] = batch * seen * cached * size
    terms["states"] = 2.0 * batch * state_bytes(config, size)  # read and written
    return {name: value for name, value in terms.items() if value}


def _weight_bytes(model: Transformer) -> Iterator[tuple[str, int]]:
    """Of every parameter, and of packed weights, which are none."""
    yield from ((name, parameter.nbytes) for name, parameter in model.named_parameters())
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield f"{name}.weight", module.weight.nbytes


def _part(name: str) -> str:
    """Which term of a decode step a parameter belongs to."""
    if name.startswith(("output.", "embedding.")):
        return "head"
    if ".experts." in name:
        return "experts"
    return next((part for part in ("attention", "mlp") if f".{part}." in name), "other")


def fixed(
    count: int, *, tokens_in: int, tokens_out: int, vocab: int, seed: int = 0, name: str = "r", temperature: float = 0.0
) -> list[Request]:
    """`count` requests of equal length; none ends early."""
    rng = Random(seed)
    return [
        _request(f"{name}{i}", [rng.randrange(vocab) for _ in range(tokens_in)], tokens_out, temperature)
        for i in range(count)
    ]


def ragged(count: int, *, most_in: int, most_out: int, vocab: int, seed: int = 0) -> list[Request]:
    """Prompts and outputs of a tenth of the maximum to the maximum; none ends early."""
    rng = Random(seed)
    return [
        _request(
            f"r{i}",
            [rng.randrange(vocab) for _ in range(rng.randint(max(1, most_in // 10), most_in))],
            rng.randint(max(1, most_out // 10), most_out),
            0.6,
        )
        for i in range(count)
    ]


def nano_vllm(count: int = 256, *, least: int = 100, most: int = 1024, vocab: int = 10_000) -> list[Request]:
    """The public benchmark of nano-vllm (bench.py): seed 0, 100 to 1,024 tokens in and out, temperature 0.6; 133,966
    tokens out."""
    rng = Random(0)
    prompts = [[rng.randint(0, vocab) for _ in range(rng.randint(least, most))] for _ in range(count)]
    return [_request(f"r{i}", prompt, rng.randint(least, most), 0.6) for i, prompt in enumerate(prompts)]


def _request(name: str, prompt: list[int], tokens_out: int, temperature: float) -> Request:
    params = SamplingParams(max_tokens=tokens_out, ignore_eos=True, temperature=temperature, seed=0)
    return Request(id=name, prompt=prompt, params=params)
