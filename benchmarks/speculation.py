"""Speculative decoding: speed alone and under load, and whether the tokens stay the same.

    python benchmarks/speculation_models.py FOLDER     # once: trains target and draft; on an H200 with
    python benchmarks/speculation.py FOLDER            # --size gpu --minutes 2.5
    python benchmarks/speculation.py FOLDER --device cuda --dtype bf16 --only alone,load

alone   one request at a time: with a draft model and a draft head on functions to write, 128 tokens each; with prompt
        lookup on "repeat this function with one name changed", to the end of the answer; speed is that of decoding,
        after the first token
load    64 requests at once
equal   500 greedy prompts, drafts of random lengths

Engines with and without drafts take turns, so that both see the same machine; of each the median counts. The last line
is all figures as JSON, with seconds spent.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from speculation_models import WORDS, function, question

from armillary.engine.engine import Engine
from armillary.engine.llm import LLM
from armillary.engine.request.request import Request
from armillary.engine.request.sampling_params import SamplingParams
from armillary.engine.speculative.draft_length import Candidate, LengthController
from armillary.spec.tables.serve import Serve

_LENGTHS = random.Random(1)


class AnyLength(LengthController):
    """Drafts of random lengths, whether they pay or not."""

    def lengths(self, decodes: int, candidates: list[Candidate], room: int) -> list[int]:
        drawn = []
        for each in candidates:
            drawn.append(_LENGTHS.randint(0, min(each.most, room)))
            room -= drawn[-1]
        return drawn


@dataclass(frozen=True, kw_only=True)
class Models:
    """The trained models, and where they run."""

    folder: Path
    device: str
    dtype: Literal["fp32", "bf16"]

    def drafting(self) -> list[str]:
        """What drafts: a head only where one was trained; prompt lookup last."""
        head = ["mtp"] if (self.folder / "target" / "draft_head").is_dir() else []
        return ["draft", *head, "ngram"]

    def opened(self, drafts: str, max_running: int) -> LLM:
        """Steps of at most 512 tokens: fewer CUDA graphs are captured, and no prompt is longer."""
        draft = str(self.folder / "draft")
        extra: dict[str, Any] = {"plain": {}, "draft": {"draft": draft}}
        extra |= {name: {"speculate": name} for name in ("ngram", "mtp")}
        serve = Serve(
            max_running=max_running,
            max_model_len=512,
            max_tokens_per_step=512,
            prefix_cache=False,
            dtype=self.dtype,
            **extra[drafts],
        )
        return LLM(self.folder / "target", serve, device=self.device)


def texts_to_write(count: int) -> list[str]:
    """Functions of which only the first line is given, so that nothing can be copied."""
    rng = random.Random(7)
    return [
        f"# rename {rng.choice(WORDS)} to {rng.choice(WORDS)}\n{function(rng)[0].splitlines()[0]}\n"
        for _ in range(count)
    ]


def texts_to_repeat(count: int) -> list[str]:
    rng = random.Random(8)
    return [question(rng)[0] for _ in range(count)]


def decode_s(engine: Engine, request: Request) -> tuple[float, int]:
    """(seconds after the first token, tokens after it)"""
    engine.scheduler.submit(request, engine.loop.clock())
    first: float | None = None
    tokens = 0
    while engine.busy:
        deltas = engine.step()
        if deltas and first is None:
            first, tokens = time.perf_counter(), -len(deltas)
        tokens += len(deltas)
    assert first is not None
    return time.perf_counter() - first, tokens


def alone(
    models: dict[str, LLM], drafts: str, texts: list[str], temperature: float, *, to_the_end: bool = False
) -> dict[str, Any]:
    """`to_the_end`: of the answer; else 128 tokens, whatever they are."""
    rates: dict[str, list[float]] = {}
    models = {name: models[name] for name in ("plain", drafts)}
    for number, text in enumerate(texts[:1] + texts):
        for name, llm in models.items():
            assert llm.tokenizer is not None
            params = SamplingParams(max_tokens=128, temperature=temperature, seed=number, ignore_eos=not to_the_end)
            request = Request(id=f"{temperature} {number}", prompt=llm.tokenizer.encode(text), params=params)
            seconds, tokens = decode_s(llm.engine, request)
            if number:  # the first is a warm-up
                rates.setdefault(name, []).append(tokens / seconds)
    state = models[drafts].engine.state()
    return {
        "case": f"alone, {drafts}, temperature {temperature:g}",
        "plain_tokens_per_s": median(rates["plain"]),
        "tokens_per_s": median(rates[drafts]),
        "speedup": median(with_ / without for with_, without in zip(rates[drafts], rates["plain"], strict=True)),
        "acceptance": state["acceptance_fraction"],
        "speedup_gauge": state["speculation_speedup"],
    }


def load(models: Models, drafts: str, repeats: int = 3) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}
    texts = texts_to_write(64)
    opened = {name: models.opened(name, 64) for name in ("plain", drafts)}
    for number in range(repeats + 1):
        for name, llm in opened.items():
            begin = time.perf_counter()
            params = [SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True) for _ in texts]
            llm.generate(texts, params)
            if number:  # the first is a warm-up
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    ratios = [without / with_ for with_, without in zip(seconds[drafts], seconds["plain"], strict=True)]
    return {
        "case": f"64 at once, {drafts}",
        "plain_tokens_per_s": 64 * 48 / median(seconds["plain"]),
        "tokens_per_s": 64 * 48 / median(seconds[drafts]),
        "speedup": median(ratios),
        "drafted": opened[drafts].engine.scheduler.totals.drafted,
    }


def equal(models: Models, drafts: str, count: int = 500) -> dict[str, Any]:
    rng = random.Random(9)
    texts = [question(rng)[0] for _ in range(count)]
    outputs = {}
    for name in ("plain", drafts):
        llm = models.opened(name, 8)
        if llm.engine.scheduler.speculation is not None:
            known = llm.engine.scheduler.speculation.controller
            llm.engine.scheduler.speculation.controller = AnyLength(known.verify, known.propose, known.most)
        made = llm.generate(texts, SamplingParams(max_tokens=24, temperature=0.0))
        outputs[name] = [each.tokens for each in made]
        totals = llm.engine.scheduler.totals
    same = sum(one == other for one, other in zip(outputs["plain"], outputs[drafts], strict=True))
    return {
        "case": f"equal, {drafts}",
        "prompts": count,
        "equal": same,
        "drafted": totals.drafted,
        "accepted": totals.accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="alone,load,equal")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    given = parser.parse_args()
    models, begin, rows = Models(folder=given.folder, device=given.device, dtype=given.dtype), time.monotonic(), []
    for row in figures(models, given.only.split(","), given.texts):
        shown = [f"{key} {value:.4g}" if key != "case" else value for key, value in row.items()]
        print(f"{time.monotonic() - begin:6.1f} s  {', '.join(shown)}", flush=True)
        rows.append({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()})
    print(
        json.dumps({"device": given.device, "seconds": round(time.monotonic() - begin, 1), "cases": rows}), flush=True
    )


def figures(models: Models, wanted: list[str], count: int) -> Iterator[dict[str, Any]]:
    if "alone" in wanted:
        drafting = models.drafting()
        opened = {name: models.opened(name, 1) for name in ("plain", *drafting)}
        for drafts in drafting[:-1]:
            for temperature in (0.0, 1.0):
                yield alone(opened, drafts, texts_to_write(count), temperature)
        yield alone(opened, "ngram", texts_to_repeat(count), 0.0, to_the_end=True)
        opened.clear()
    for case, run in (("load", load), ("equal", equal)):
        if case in wanted:
            yield from (run(models, drafts) for drafts in models.drafting())


if __name__ == "__main__":
    main()
