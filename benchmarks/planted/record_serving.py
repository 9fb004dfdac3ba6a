"""Levers of a server that need a GPU, pulled there on the shape of Qwen3-0.6B: CUDA graphs, prefix cache, chunks, rows.

    python -m benchmarks.planted.record_serving FOLDER [--only NAME …] [--device cuda] [--tiny] [--limit S]

As `record_levers`: each is a run, diagnosed, its recipe changed as the diagnosis says, and run again. Gauges of the run
without graphs are kept, so that its diagnosis can be made anywhere.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from armillary.engine.build import make_engine
from armillary.model.transformer import Transformer
from armillary.spec.recipe import Recipe
from armillary.store.home import Home
from armillary.store.runs import Run
from benchmarks.planted.record_cases import asked_for
from benchmarks.planted.record_pulls import record_pulls
from tests.planted.lever_case import LeverCase
from tests.planted.problem import Wish
from tests.planted.serve_small import Arrival, drive, model_of, serve_recipe, serving_recipe
from tests.planted.traffic import at_once, at_rate, mixed, sharing

SHAPE = {
    "num_layers": 28,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 3072,
    "vocab": 32_768,
    "context": 16_384,
}
"""of Qwen3-0.6B, with fewer words"""


class Place:
    """Where cases run, and how large they are."""

    def __init__(self, device: str, *, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self._model: Transformer | None = None
        self._warm: set[tuple[bool, int | None]] = set()
        self._arrivals: dict[str, Sequence[Arrival]] = {}

    def case(
        self,
        name: str,
        key: str,
        arrivals: Sequence[Arrival],
        serve: Mapping[str, Any],
        objective: Mapping[str, float] | None = None,
    ) -> LeverCase:
        """The shape served as `serve` says, asked what arrives."""
        tables: dict[str, Any] = {
            "model": {} if self.tiny else SHAPE,
            "objective": dict(objective or {}),
            "serve": {
                "max_model_len": 8192 if not self.tiny else 2048,
                "prefill_tokens": None,
                "max_running": 64,
                "kv_bytes": 8_000_000_000 if not self.tiny else None,
                **serve,
            },
        }

        def run(recipe: Recipe, home: Home) -> Run:
            made = serve_recipe(recipe, home, arrivals, device=self.device, model=self._made(recipe))
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return made

        self._arrivals[name] = arrivals
        return LeverCase(name=name, key=key, recipe=serving_recipe(Wish(), tables), run=run)

    def warm(self, case: LeverCase) -> None:
        """What a process does only once for each shape: compile kernels and choose tilings, with prompts whole and in
        parts, with graphs and without."""
        now = case.recipe.serve
        for serve in (now, replace(now, prefill_tokens=1024), replace(now, graphs=True)):
            if (kind := (serve.graphs, serve.prefill_tokens)) not in self._warm:
                self._warm.add(kind)
                engine, _ = make_engine(self._made(case.recipe), None, serve, seed=0, record=_unheard)
                drive(engine, self._arrivals[case.name])

    def _made(self, recipe: Recipe) -> Transformer:
        self._model = self._model or model_of(recipe, 0, self.device)
        return self._model

    @property
    def scale(self) -> float:
        return 0.25 if self.tiny else 1.0


def _unheard(gauges: Mapping[str, Any], **of: Any) -> None:
    """For engines that calibrate_steps as if somebody kept records."""


def graphs(at: Place) -> LeverCase:
    """Every kernel of a decode step is launched by the host."""
    requests = mixed(64, tokens_in=(64, 256), tokens_out=(int(128 * at.scale), int(192 * at.scale)), seed=0)
    return at.case("CUDA graphs", "serve.graphs", at_once(requests), {"graphs": False})


def prefix_cache(at: Place) -> LeverCase:
    """Equal beginnings of thousands of tokens, computed again for each request."""
    requests = sharing(
        int(192 * at.scale), prefixes=2, prefix_tokens=int(4096 * at.scale), tokens_in=64, tokens_out=16, seed=0
    )
    return at.case("prefix cache", "serve.prefix_cache", at_once(requests), {"prefix_cache": False})


def chunk_size(at: Place) -> LeverCase:
    """Prompts of thousands of tokens whole among 32 answers."""
    chats = at_once(mixed(32, tokens_in=(32, 64), tokens_out=(int(700 * at.scale), int(800 * at.scale)), seed=0))
    long = mixed(
        int(40 * at.scale),
        tokens_in=(int(6000 * at.scale), int(7000 * at.scale)),
        tokens_out=(4, 8),
        seed=1,
        name="long",
    )
    return at.case(
        "chunk size",
        "serve.prefill_tokens",
        [*chats, *at_rate(long, 20.0 * at.scale, 0)],
        {"max_tokens_per_step": 16_384},
        {"itl_p99_s": 0.010},
    )


def rows(at: Place) -> LeverCase:
    """Four requests at a time."""
    requests = mixed(
        int(64 * at.scale), tokens_in=(64, 128), tokens_out=(int(96 * at.scale), int(128 * at.scale)), seed=0
    )
    return at.case("batch size", "serve.max_running", at_once(requests), {"max_running": 4})


CASES: dict[str, Callable[[Place], LeverCase]] = {
    "graphs": graphs,
    "prefix-cache": prefix_cache,
    "chunk-size": chunk_size,
    "rows": rows,
}


def main() -> int:
    asked, begin = asked_for("record_serving", CASES), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="armillary-levers-") as folder:
        home, at = Home.at(folder), Place(asked.device, tiny=asked.tiny)
        return record_pulls(asked, lambda name: CASES[name](at), at.warm, home, begin=begin, prefix="lever-serving")


if __name__ == "__main__":
    raise SystemExit(main())
