"""Serving speed-ups in one table: each lever measured with the real engine on this CPU, beside what is advertised.

    python examples/serving_speedups.py             three minutes; writes serving_speedups/table.md and plot.svg
    python examples/serving_speedups.py --quick     a tiny model, some of the levers, one round

Batching, prefix cache, int8 and bf16 weights, compilation, speculation. serving_model.py trains a small model on
generated orders and grows it to one that is memory-bound. docs/exercises/serving_speedups.md says what to predict.
"""

from __future__ import annotations

import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from exercise import finish, read_options, table
from serving_model import Models, make_models, order
from small_models import resnet

from armillary.engine.bench.measure import serve_all
from armillary.engine.llm import LLM
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import BadRecipe
from armillary.model.export_graph import export, inputs_like
from armillary.profiling.dtypes.choice import resolve_serving, serving_shape
from armillary.profiling.dtypes.rates import device_rates
from armillary.report.bars import series_bars
from armillary.serving.predict.torch_model import open_exported
from armillary.spec.tables.serve import Predict, Serve
from armillary.store.home import Home
from armillary.store.resolve_model import resolve_model
from armillary.units import count_text, seconds_text

TOGETHER, TOKENS = 8, 24
PREFIX, OWN = 384, 16
LENGTHS = (4, 8, 12, 40)
"""tokens of the answers whose lengths differ: one of four is long"""
KV_BYTES = 96 << 20
VLLM = "24 × Hugging Face Transformers, at most ([vLLM](https://blog.vllm.ai/2023/06/20/vllm.html), 2023)"
ANYSCALE = "8 × naive batching ([Anyscale](https://www.anyscale.com/blog/continuous-batching-llm-inference), 2023)"
SGLANG = "6.4 × other systems' throughput, at most ([SGLang](https://arxiv.org/abs/2312.07104), 2023)"
GPT_FAST = "1.5 × bf16 on an A100 ([gpt-fast](https://pytorch.org/blog/accelerating-generative-ai-2/), 2023)"
SAXENA = "2 to 4 × where output repeats input ([Saxena](https://github.com/apoorvumang/prompt-lookup-decoding), 2023)"
LEVIATHAN = "2 to 3 × on T5-XXL ([Leviathan et al.](https://arxiv.org/abs/2211.17192), 2022)"
PYTORCH_2 = "2.27 × on an A100, mean of 180 models ([PyTorch 2](https://doi.org/10.1145/3620665.3640366), 2024)"
NUMBERS = count()
Rate = Callable[[LLM], float]


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A setting of [serve] before and after, the work, and what others promise of it; `rate` is higher where faster."""

    name: str
    work: str
    unit: str
    rate: Rate
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any]
    advertised: str
    at_most: Callable[[LLM], float]
    """what arithmetic allows, from what the engine counted"""


@dataclass(frozen=True, kw_only=True)
class Gained:
    """What a lever brought."""

    name: str
    work: str
    unit: str
    before: float
    after: float
    gain: float
    at_most: float | None
    advertised: str


# --- the work


def prompts(llm: LLM, number: int, seed: int = 3) -> list[list[int]]:
    """Two orders and the beginning of a third, as tokens."""
    draw = random.Random(seed)
    assert llm.tokenizer is not None
    return [llm.tokenizer.encode(order(draw) + order(draw) + order(draw)[:12]) for _ in range(number)]


def requests(asked: Sequence[list[int]], lengths: Sequence[int]) -> list[Request]:
    """Greedy, each of exactly its length."""
    return [
        Request(
            id=f"{next(NUMBERS)}",
            prompt=prompt,
            params=SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        )
        for prompt, length in zip(asked, lengths, strict=True)
    ]


def tokens_per_s(llm: LLM, asked: list[Request]) -> float:
    """By the clock of this process, which stands still while other programs run; the engine has one thread."""
    begin = time.process_time()
    served = serve_all(llm.engine, asked)
    return served.tokens_out / (time.process_time() - begin)


def alone(llm: LLM) -> float:
    """One request at a time."""
    return statistics.mean(tokens_per_s(llm, requests([prompt], [TOKENS])) for prompt in prompts(llm, 2))


def together(llm: LLM) -> float:
    """Many requests at once."""
    return tokens_per_s(llm, requests(prompts(llm, TOGETHER), [TOKENS] * TOGETHER))


def ragged(llm: LLM) -> float:
    """The same where answers differ in length."""
    return tokens_per_s(llm, requests(prompts(llm, TOGETHER), LENGTHS * (TOGETHER // len(LENGTHS))))


def shared_prefix(llm: LLM) -> float:
    """First tokens: requests one after the other that begin alike; the first one's prefix is new and does not count."""
    draw, vocab = random.Random(5), 300
    prefix = [draw.randrange(vocab) for _ in range(PREFIX)]
    asked = [prefix + [draw.randrange(vocab) for _ in range(OWN)] for _ in range(4)]
    return statistics.mean([tokens_per_s(llm, requests([prompt], [1])) for prompt in asked][1:])


# --- what arithmetic allows


def tokens_per_step(llm: LLM) -> float:
    """Expected tokens of a step in which all drafts are tried and cost nothing: 1 + a + a² + …"""
    accepted = llm.engine.state()["acceptance_fraction"]
    return float(sum(accepted**j for j in range(Serve().max_draft + 1)))


def levers(models: Models) -> list[Lever]:
    mean = statistics.mean(LENGTHS)
    return [
        Lever(
            name="continuous batching",
            work=f"{TOGETHER} requests of {TOKENS} tokens, before: one at a time",
            unit="tokens/s",
            rate=together,
            before={"batching": "none"},
            after={},
            advertised=VLLM,
            at_most=lambda llm: float(TOGETHER),
        ),
        Lever(
            name="continuous batching",
            work=f"answers of {LENGTHS[0]} to {LENGTHS[-1]} tokens, before: static batches of 4",
            unit="tokens/s",
            rate=ragged,
            before={"batching": "static", "max_running": 4},
            after={"max_running": 4},
            advertised=ANYSCALE,
            at_most=lambda llm: LENGTHS[-1] / mean,
        ),
        Lever(
            name="prefix cache",
            work=f"prompts of {PREFIX} shared and {OWN} own tokens",
            unit="first tokens/s",
            rate=shared_prefix,
            before={"prefix_cache": False},
            after={"prefix_cache": True},
            advertised=SGLANG,
            at_most=lambda llm: (PREFIX + OWN) / OWN,
        ),
        Lever(
            name="int8 weights",
            work="one request at a time",
            unit="tokens/s",
            rate=alone,
            after={"weights": "int8"},
            advertised=GPT_FAST,
            at_most=lambda llm: models.int8_ratio,
        ),
        Lever(
            name="int8 weights",
            work=f"{TOGETHER} requests together",
            unit="tokens/s",
            rate=together,
            after={"weights": "int8"},
            advertised=GPT_FAST,
            at_most=lambda llm: models.int8_ratio,
        ),
        Lever(
            name=BF16,
            work="one request at a time",
            unit="tokens/s",
            rate=alone,
            after={"dtype": "bf16"},
            advertised="–",
            at_most=lambda llm: 2.0,
        ),
        Lever(
            name="prompt lookup",
            work="one request at a time",
            unit="tokens/s",
            rate=alone,
            after={"speculate": "ngram"},
            advertised=SAXENA,
            at_most=tokens_per_step,
        ),
        Lever(
            name="draft model",
            work=f"one request at a time, {count_text(models.draft_parameters)} drafts",
            unit="tokens/s",
            rate=alone,
            after={"draft": str(models.draft)},
            advertised=LEVIATHAN,
            at_most=tokens_per_step,
        ),
        Lever(
            name="draft model",
            work=f"{TOGETHER} requests together",
            unit="tokens/s",
            rate=together,
            after={"draft": str(models.draft)},
            advertised=LEVIATHAN,
            at_most=tokens_per_step,
        ),
    ]


BF16 = "bf16 weights"
QUICK = {"prefix cache", "int8 weights", "prompt lookup"}


# --- measure


def opened(model: Path, settings: dict[str, Any]) -> LLM:
    plain: dict[str, Any] = {"dtype": "fp32", "max_model_len": 512, "kv_bytes": KV_BYTES, "prefix_cache": False}
    return LLM(model, Serve(**{"max_running": TOGETHER, "threads": 1} | plain | settings), device="cpu")


def bf16_refused(model: Path) -> str:
    """Why the product would not serve in bf16 here, where it is emulated and takes many times as long; else nothing."""
    serve, source = Serve(dtype="bf16"), resolve_model(str(model), Home.default(), need_weights=True)
    try:
        resolve_serving(serve, device_rates(Home.default(), "cpu", serving_shape(source.config, serve)), stored="fp32")
    except BadRecipe as error:
        return str(error).partition(";")[0]
    return ""


def measure(lever: Lever, model: Path, rounds: int) -> Gained:
    """Before and after take turns; the first round is not counted."""
    before, after = opened(model, lever.before), opened(model, lever.after)
    rates = [(lever.rate(before), lever.rate(after)) for _ in range(rounds + 1)][-rounds:]
    return Gained(
        name=lever.name,
        work=lever.work,
        unit=lever.unit,
        before=statistics.median(rate for rate, _ in rates),
        after=statistics.median(rate for _, rate in rates),
        gain=statistics.median(rate / other for other, rate in rates),
        at_most=lever.at_most(after),
        advertised=lever.advertised,
    )


def compilation(folder: Path, rounds: int) -> Gained | None:
    """A small ResNet by the predict server's model, plain and compiled; None without a C++ compiler."""
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return None
    module = resnet(blocks=1)
    (example,) = module.example_inputs
    file = folder / "resnet.pt2"
    export(module, inputs_like([example]), file, "pt2", rows=len(example))
    plain, fast = (open_exported(file, Predict(threads=1, compile=on)) for on in (False, True))
    arrays = [example.numpy()]
    begin = time.perf_counter()
    fast.run(arrays)
    compile_s = time.perf_counter() - begin

    def rate(model: Any) -> float:
        start, calls = time.process_time(), 0
        while time.process_time() - start < 0.5:
            model.run(arrays)
            calls += 1
        return calls / (time.process_time() - start)

    rates = [(rate(plain), rate(fast)) for _ in range(rounds + 1)][1:]
    return Gained(
        name="compilation",
        work=f"a ResNet of 7 convolutions, {len(example)} images; compiled in {seconds_text(compile_s)}",
        unit="batches/s",
        before=statistics.median(one for one, _ in rates),
        after=statistics.median(other for _, other in rates),
        gain=statistics.median(other / one for one, other in rates),
        at_most=None,
        advertised=PYTORCH_2,
    )


def row(gained: Gained) -> tuple[str, ...]:
    return (
        gained.name,
        gained.work,
        f"{gained.before:,.3g} → {gained.after:,.3g} {gained.unit}",
        f"**{gained.gain:.2f} ×**",
        "–" if gained.at_most is None else f"{gained.at_most:.1f} ×",
        gained.advertised,
    )


def main() -> None:
    options = read_options("serving_speedups", __doc__)
    rounds = 1 if options.quick else 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder, quick=options.quick)
        found = []
        refused = bf16_refused(models.target)
        for lever in levers(models):
            if (options.quick and lever.name not in QUICK) or (refused and lever.name == BF16):
                continue
            found.append(measure(lever, models.target, rounds))
            print(f"{lever.name}, {lever.work}: {found[-1].gain:.2f} ×", flush=True)
        compiled = None if options.quick else compilation(folder, rounds)
    found += [compiled] if compiled is not None else []
    heads = ("lever", "on what", "before → after", "gain", "at most, by hand", "advertised")
    text = (
        f"{count_text(models.target_parameters)} parameters in fp32, one thread, medians of {rounds} rounds; the model "
    )
    text += f"was trained to a loss of {models.loss:.2f}:\n\n" + table(heads, [row(x) for x in found])
    text += f"\n\nbf16 weights were not tried: {refused}." if refused else ""
    bars = [(f"{each.name}: {each.work}", [each.gain, each.at_most]) for each in found]
    chart = series_bars(
        bars,
        ("gained", "at most, by hand"),
        label="What each lever gained, and at most could",
        text=lambda x: f"{x:.2f} ×",
    )
    finish(options, text, chart, "what each lever gained, beside what arithmetic allows")


if __name__ == "__main__":
    main()
