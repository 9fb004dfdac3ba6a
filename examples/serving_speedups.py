"""Serving speed-ups in one table: each lever measured with the real engine on this CPU, beside what is advertised.

    python examples/serving_speedups.py             two minutes; writes serving_speedups/table.md and plot.svg
    python examples/serving_speedups.py --quick     a tiny model, some of the levers, one round

Batching, prefix cache, int8 and bf16 weights, compilation, speculation. serving_model.py trains a small model on
generated orders and grows it to one that is memory-bound; serving_levers.py says what is timed.
docs/exercises/serving_speedups.md says what to predict.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from exercise import finish, read_options, table
from serving_levers import BF16, QUICK, TOGETHER, Lever, levers
from serving_model import make_models
from small_models import resnet

from armillary.engine.llm import LLM
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

PLAIN: dict[str, Any] = {
    "dtype": "fp32",
    "threads": 1,
    "max_model_len": 512,
    "max_running": TOGETHER,
    "kv_bytes": 96 << 20,
    "prefix_cache": False,
}
PYTORCH_2 = "2.27 × on an A100, mean of 180 models ([PyTorch 2](https://doi.org/10.1145/3620665.3640366), 2024)"


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


def opened(model: Path, settings: dict[str, Any]) -> LLM:
    return LLM(model, Serve(**PLAIN | settings), device="cpu")


@dataclass(frozen=True, kw_only=True)
class Engines:
    """One engine without any lever serves as "before" of all levers that need nothing else; one with a lever counts
    what that lever did, so each has its own."""

    model: Path
    befores: dict[str, LLM] = field(default_factory=dict)

    def before(self, lever: Lever) -> LLM:
        key = repr(sorted((PLAIN | lever.before).items()))
        if key not in self.befores:
            self.befores[key] = opened(self.model, lever.before)
        return self.befores[key]

    def after(self, lever: Lever) -> LLM:
        return opened(self.model, lever.after)


def bf16_refused(model: Path) -> str:
    """Why the product would not serve in bf16 here, where it is emulated and takes many times as long; else nothing."""
    serve, source = Serve(dtype="bf16"), resolve_model(str(model), Home.default(), need_weights=True)
    try:
        resolve_serving(serve, device_rates(Home.default(), "cpu", serving_shape(source.config, serve)), stored="fp32")
    except BadRecipe as error:
        return str(error).partition(";")[0]
    return ""


def measure(lever: Lever, engines: Engines, rounds: int) -> Gained:
    """Before and after take turns; the first round is not counted."""
    before, after = engines.before(lever), engines.after(lever)
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
        engines, found = Engines(model=models.target), []
        refused = bf16_refused(models.target)
        for lever in levers(models):
            if (options.quick and lever.name not in QUICK) or (refused and lever.name == BF16):
                continue
            found.append(measure(lever, engines, rounds))
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
