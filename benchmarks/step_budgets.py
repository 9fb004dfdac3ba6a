"""Step budgets of real steps: training eager and compiled, decoding eager and as a CUDA graph.

    python benchmarks/step_budgets.py [--device cuda] [--only train] [--json FILE] [--pages FOLDER]

Each budget must add up to the wall time within 0.5 %, with at most 5 % unknown; on a GPU the kernels' times must add up
to the device time that the trace itself holds. Ceilings are measured first, in the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from armillary.machine.features import has_native
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import Transformer, build
from armillary.profiling.ceilings.ceilings import measure_ceilings
from armillary.profiling.profile import BUDGET, Profile
from armillary.profiling.record.profile_callable import profile
from armillary.profiling.report.profile_page import write_page
from armillary.profiling.report.profile_text import budget_line, top_rows
from armillary.spec import catalogue
from armillary.store.home import Home
from armillary.store.peaks import save_peaks
from tests.model.contiguous_cache import ContiguousCache

Step = Callable[[], object]
Made = tuple[Step, dict[str, Any]]
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"model": "qwen3-0.6b", "batch": 4, "length": 2048, "rows": 32, "context": 2048, "tokens": 2},
    "cpu": {"model": "smollm2-135m", "batch": 1, "length": 256, "rows": 2, "context": 128, "tokens": 4},
}


def training(model: Transformer, batch: int, length: int, *, compiled: bool) -> Step:
    """Forward, loss, backward and a fused AdamW step on random tokens."""
    device = next(model.parameters()).device
    tokens = torch.randint(model.config.vocab, (batch, length + 1), device=device)
    positions = torch.arange(length, device=device).expand(batch, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.head(model(inputs, positions, plain))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    run = torch.compile(loss_of) if compiled else loss_of

    def step() -> None:
        run(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Decoding:
    """Greedy decoding of some rows from a filled cache; everything stays on the device, so a graph can hold it."""

    def __init__(self, model: Transformer, rows: int, context: int) -> None:
        first = next(model.parameters())
        self.model, self.context = model, context
        self.cache = ContiguousCache(model.config, batch=rows, length=context, dtype=first.dtype, device=first.device)
        self.cache.keys_LBSKD.normal_()
        self.cache.values_LBSKD.normal_()
        self.tokens = torch.randint(model.config.vocab, (rows, 1), device=first.device)
        self.positions = torch.full((rows, 1), context // 2, device=first.device)

    @torch.inference_mode()
    def token(self) -> None:
        hidden = self.model(self.tokens, self.positions, self.cache.at(self.positions, upto=self.context))
        self.tokens.copy_(self.model.head(hidden[:, -1]).argmax(-1, keepdim=True))
        self.positions.add_(1)

    def several(self, count: int) -> Step:
        return lambda: [self.token() for _ in range(count)]

    def as_graph(self, count: int) -> Step:
        for _ in range(3):
            self.token()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.token()
        return lambda: [graph.replay() for _ in range(count)]


def device_seconds(trace: Path) -> float:
    """What ran on the device during the steps, summed from the trace by itself."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event.get("cat") == "user_annotation"]
    low = min(event["ts"] for event in marks if str(event["name"]).startswith("ProfilerStep#"))
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sum(event["dur"] for event in events if event.get("cat") in kinds and event["ts"] >= low) / 1e6


def look(name: str, step: Step, home: Home, pages: Path | None, **more: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        found = profile(step, steps=5, warmup=4, home=home, trace_path=trace, source=name, **more)
        on_device = device_seconds(trace) if found.kernels else None
    if pages:
        write_page(found, pages / f"{name.replace(' ', '_')}.html")
    print(f"\n{name}: {budget_line(found)}", *(f"  - {text}" for text in found.findings[:3]), sep="\n")
    for row in top_rows(found, 6):
        share, reached = row.device_s / found.wall_s, row.roofline_fraction or 0.0
        print(f"    {row.name[:70]:70} {row.work:12} {share:6.1%} of the time, {reached:.0%} of the roofline")
    return summary(name, found, on_device)


def summary(name: str, found: Profile, on_device: float | None) -> dict[str, Any]:
    kernels = sum(row.device_s for row in found.kernels)
    return {
        "name": name,
        "step_ms": round(found.step_s * 1e3, 3),
        "sum_percent": round(100 * sum(found.budget.values()) / found.wall_s, 4),
        **{part: round(100 * found.fraction(part), 1) for part in BUDGET},
        "kernels_over_trace": round(kernels / on_device, 6) if on_device else None,
        "notes": [note for note in found.notes if "profil" in note or "no model" in note],
    }


def looks(device: str, home: Home, pages: Path | None, only: str) -> Iterator[dict[str, Any]]:
    """Each step whose name begins with `only`."""
    size = SIZES[device]
    config = catalogue.model(size["model"]).config
    dtype = torch.bfloat16 if device != "cpu" or has_native("bf16") else torch.float32
    model = build(config, dtype=dtype, device=device, seed=0, rope_length=4096)
    for name, make in cases(model, size, device):
        if name.startswith(only):
            step, more = make()
            yield look(name, step, home, pages, **more)


def cases(model: Transformer, size: dict[str, Any], device: str) -> Iterator[tuple[str, Callable[[], Made]]]:
    """Name and maker of each step: what is made is the step, and more arguments of `profile`."""
    decoding = cache(lambda: Decoding(model, size["rows"], size["context"]))
    yield "decode eager", lambda: (decoding().several(size["tokens"]), {})
    if device == "cuda":
        yield "decode in a CUDA graph", lambda: (decoding().as_graph(size["tokens"]), {})
        yield (
            "decode in a CUDA graph, with its twin",
            lambda: (
                decoding().as_graph(size["tokens"]),
                {"twin": decoding().token},
            ),
        )
    for compiled in (False, True):
        yield (
            f"train {'compiled' if compiled else 'eager'}",
            lambda compiled=compiled: (
                training(model, size["batch"], size["length"], compiled=compiled),
                {},
            ),
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", default="", help="steps whose names begin so")
    options.add_argument("--json", type=Path)
    options.add_argument("--pages", type=Path)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Home.at(Path(folder))
        measured = measure_ceilings(torch.device(asked.device), quick=True, only=("bandwidth", "gemm", "launch"))
        save_peaks(home, measured.peaks)
        rows = list(looks(asked.device, home, asked.pages, asked.only))
    text = json.dumps({"device": measured.peaks.device, "torch": torch.__version__, "rows": rows})
    if asked.json:
        asked.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
