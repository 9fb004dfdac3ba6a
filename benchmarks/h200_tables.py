"""Sixteen configurations of one H200, drawn by a seed and predicted before they run: eight trainings, eight servers.

    python -m benchmarks.h200_tables draw --seed N     draws and predicts; writes --drawn FILE, to be committed
    python -m benchmarks.h200_tables train             on the GPU: trains the eight
    python -m benchmarks.h200_tables serve             on the GPU: serves the eight
    python -m benchmarks.h200_tables table             predicted beside measured; exits with 1 above 8 and 15 %

--drawn names the drawing, by default h200_tables.json; a second and a third are of later planners. Predictions rest on
the catalogue and on the ceilings recorded in it: nothing of this GPU is measured before. A training is judged by its
median step, a server at a rate by its median time between tokens, and one that gets everything at once by its tokens
per second. Measurements go into the drawing's .measured.json (--to FILE), which names the commit of the predictions.
The file is written after every configuration, none begins after --seconds (default 420), and a second call measures
what is missing: a machine that is lent for ten minutes loses nothing. What a configuration writes to disk is deleted
when its process has ended, however it ended.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any
from unittest import mock

from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.serving.capacity import Capacity, saturated
from armillary.planning.serving.deployment_options import from_layout
from armillary.planning.serving.serving_plan import serving_request
from armillary.planning.training.layout_prediction import Prediction, predict
from armillary.planning.training.resolve_recipe import resolve
from armillary.spec.recipe import Recipe, recipe_from_dict
from armillary.store.home import Home

DRAWN = Path(__file__).with_name("h200_tables.json")
KINDS = {
    "full": ("smollm2-360m", "qwen2.5-0.5b", "tinyllama-1.1b", "llama-3.2-1b", "qwen3-1.7b", "llama-3.2-3b"),
    "fp8": ("tinyllama-1.1b", "llama-3.2-1b", "smollm2-1.7b", "llama-3.2-3b"),
    "lora": ("qwen3-4b", "mistral-7b-v0.3", "llama-3.1-8b", "qwen3-8b"),
    "experts": ("moe-8", "moe-16"),
}
"""kind of training -> models; two of each kind are drawn"""
MIXTURES = {"moe-8": (8, 2, 2048, 16), "moe-16": (16, 4, 1024, 12)}
"""experts, those per token, width of one, layers; the rest as tinyllama-1.1b"""
SERVED = (
    "qwen3-0.6b",
    "llama-3.2-1b",
    "qwen3-1.7b",
    "llama-3.2-3b",
    "qwen3-4b",
    "mistral-7b-v0.3",
    "llama-3.1-8b",
    "qwen3-14b",
)
FILL = 0.8
"""most of the device's memory that a drawn training may be predicted to use"""
STEPS, WARM_UP = 14, 4
BATCH_TOKENS = 16_384
"""of a drawn training's micro-batch; with SERVED_S, so that sixteen configurations take minutes"""
SERVED_S = 12
"""of traffic that comes at a rate"""
BARS = {"train": 0.08, "serve": 0.15}


# --- drawing and predicting


def draw(seed: int) -> dict[str, Any]:
    """All sixteen with what is predicted of them."""
    with tempfile.TemporaryDirectory(prefix="armillary-h200-") as folder:
        dice, home = Random(seed), Home.at(folder)
        trained = [drawn_training(kind, dice, home) for kind in KINDS for _ in range(2)]
        served = [drawn_server(model, dice, home, at_rate=i % 2 == 0) for i, model in enumerate(dice.sample(SERVED, 8))]
    return {"seed": seed, "date": time.strftime("%Y-%m-%d", time.gmtime()), "train": trained, "serve": served}


def drawn_training(kind: str, dice: Random, home: Home) -> dict[str, Any]:
    """A model of the kind, a sequence, and as many sequences per step as are predicted to fit."""
    name, sequence = dice.choice(KINDS[kind]), dice.choice((1024, 2048, 4096, 8192))
    accumulated, rank = dice.choice((1, 2)), dice.choice((8, 16, 64))
    largest = None
    for rows in (1, 2, 4, 8, 16, 32):
        tables = training_tables(kind, name, sequence, rows, accumulated, rank)
        found = predicted_training(recipe_from_dict(tables), home)
        if found.memory.total[0] > FILL * found.memory_limit and largest is not None:
            break
        largest = tables, found
        if rows * sequence >= BATCH_TOKENS:
            break
    assert largest is not None
    tables, found = largest
    within = found.step_interval()
    return {
        "kind": kind,
        "tables": tables,
        "predicted": {
            "step_s": float(found.time.total[0]),
            "interval": [within.low, within.high],
            "allocated_bytes": float(found.memory.allocated[0]),
        },
    }


def training_tables(kind: str, name: str, sequence: int, rows: int, accumulated: int, rank: int) -> dict[str, Any]:
    model: dict[str, Any] = {"name": name}
    if kind == "experts":
        experts, top_k, ffn, layers = MIXTURES[name]
        moe = {"num_experts": experts, "top_k": top_k, "ffn": ffn, "aux_loss": 0.01}
        mixture = {"family": "mixtral", "moe_every": 1, "ffn": 0, "num_layers": layers, "moe": moe}
        model = {"name": "tinyllama-1.1b", **mixture}
    job: dict[str, Any] = {"sequence": sequence, "batch_tokens": sequence * rows * accumulated, "steps": STEPS}
    job |= {"eval_every": 0, "save_every": 0, "profile_every": 0}
    if kind == "lora":
        job |= {"lora_rank": rank}
    return {
        "model": model | {"context": max(sequence, 2048)},
        "hardware": {"on": "h200x1"},
        "layout": {"precision": "fp8" if kind == "fp8" else "bf16", "micro_batch": rows},
        "train": job,
    }


def predicted_training(recipe: Recipe, home: Home) -> Prediction:
    problem = resolve(recipe, recipe.model_config(), recipe.cluster(), home)
    return predict(problem.case, as_arrays([problem.layout]))


def drawn_server(name: str, dice: Random, home: Home, *, at_rate: bool) -> dict[str, Any]:
    """A model with prompts and answers of some length, at a share of the rate it is predicted to sustain, or all at
    once: four times as many as run together."""
    shapes, rows = dice.choice(((128, 256), (512, 128), (1024, 256), (2048, 64))), dice.choice((16, 64, 128))
    load = round(dice.uniform(0.25, 0.7), 2)
    tables = serving_tables(name, shapes, rows, 1.0)
    most = capacity(tables, home).highest.requests_per_s
    rate = round(load * most, 3) if at_rate else round(most, 3)
    tables = serving_tables(name, shapes, rows, rate)
    gauge = "itl_p50_s" if at_rate else "tokens_out_per_s"
    found, count = capacity(tables, home), max(24, min(400, round(rate * SERVED_S))) if at_rate else 4 * rows
    value = found.actual.itl_p50_s if at_rate else saturated(found.server, count).tokens_out_per_s
    return {
        "kind": "at a rate" if at_rate else "all at once",
        "tables": tables,
        "requests": count,
        "predicted": {gauge: float(value)},
    }


def capacity(tables: Mapping[str, Any], home: Home) -> Capacity:
    """What one server of these tables sustains, and its latencies at the rate of its traffic."""
    recipe = recipe_from_dict(tables)
    request = serving_request(recipe, recipe.model_config(), recipe.cluster(), home)
    found = from_layout(request, recipe.layout).capacity
    assert found is not None, "every model drawn fits one device"
    return found


def serving_tables(name: str, shape: tuple[int, int], rows: int, rate: float) -> dict[str, Any]:
    return {
        "model": {"name": name},
        "hardware": {"on": "h200x1"},
        "layout": {"precision": "bf16"},
        "serve": {"max_running": rows, "max_model_len": 4096, "prefix_cache": False},
        "traffic": {"requests_per_s": rate, "tokens_in": shape[0], "tokens_out": shape[1]},
    }


# --- measuring, on the GPU


def measure(asked: argparse.Namespace, drawn: Mapping[str, Any], known: dict[str, Any]) -> None:
    """Every configuration of a table that is not known yet, each in a process of its own, which leaves no memory."""
    which, begin = asked.what, time.monotonic()
    for index, row in enumerate(drawn[which]):
        if known.get(which, [{}] * len(drawn[which]))[index] or time.monotonic() - begin > asked.seconds:
            continue
        at, command = time.monotonic(), [sys.executable, "-m", "benchmarks.h200_tables", which, "--only", str(index)]
        with tempfile.TemporaryDirectory(prefix="armillary-h200-") as home:
            files = ["--drawn", str(asked.drawn), "--to", str(asked.to), "--home", home]
            status = subprocess.run([*command, *files], check=False).returncode
        known = json.loads(asked.to.read_text()) if asked.to.is_file() else known
        if status:
            note(which, drawn, known, asked.to, index, {"failed": f"ended with status {status}"})
        name, took = row["tables"]["model"]["name"], time.monotonic() - at
        print(row["kind"], name, row["predicted"], known[which][index], f"{took:.0f} s", flush=True)
    left, count = sum(not each for each in known.get(which, [{}] * len(drawn[which]))), len(drawn[which])
    print(f"{left} of {count} are left for another call" if left else f"all {count} are measured")


def measure_one(
    which: str, drawn: Mapping[str, Any], known: dict[str, Any], target: Path, index: int, home: Home
) -> None:
    """One configuration, here; one that fails says so."""
    one: Callable[[Mapping[str, Any], Home], dict[str, float]] = {"train": trained, "serve": served}[which]
    found: dict[str, Any]
    try:
        found = one(drawn[which][index], home)
    except Exception as error:  # the other configurations are still worth their minutes
        found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    note(which, drawn, known, target, index, found)


def note(
    which: str,
    drawn: Mapping[str, Any],
    known: dict[str, Any],
    target: Path,
    index: int,
    found: Mapping[str, Any],
) -> None:
    """Write a configuration's result beside those that are known."""
    known.setdefault(which, [{} for _ in drawn[which]])[index] = dict(found)
    target.write_text(json.dumps(known, indent=1) + "\n")


def trained(row: Mapping[str, Any], home: Home, device: str | None = None) -> dict[str, float]:
    from armillary.model.transformer import Transformer
    from armillary.store.gauges import columns
    from armillary.training.checkpoint.saver import Saver
    from armillary.training.run_lifecycle import RunLifecycle
    from tests.planted.train_small import one_text, train_recipe

    tables = dict(row["tables"]) | {"data": {"source": str(one_text(home)), "held_out": 0.0}}
    tables["hardware"] = {"on": "here"}
    with (
        mock.patch.object(Transformer, "initialize", drawn_on_device),
        mock.patch.object(Saver, "prepare", lambda *_: None),
        mock.patch.object(RunLifecycle, "save", lambda *_, **__: {}),
        mock.patch.object(RunLifecycle, "end", without_files),
    ):
        run = train_recipe(recipe_from_dict(tables), home, device=device)
    steps, peaks = columns(run.gauges, ["step_s", "memory_peak_bytes"]).values()
    return {"step_s": median(steps[WARM_UP:]), "allocated_bytes": max(peaks, default=0.0)}


def drawn_on_device(model: Any, **_seed: Any) -> None:
    """Random weights where they are: the product's are the same on every device, which takes a minute for 8 billion."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)


def without_files(lifecycle: Any, first: int, step: int, *, finished: bool) -> Any:
    """The end of a run without its export. With save_every 0 a run still saves its last step, and its end would save it
    where that had not been done: tens of gigabytes that nothing here reads."""
    return lifecycle.ended(first, step, finished=False)


def served(row: Mapping[str, Any], home: Home, device: str = "cuda") -> dict[str, float]:
    from armillary.diagnosis.readings.run_folder import read_run
    from armillary.model.transformer import Transformer
    from tests.planted import traffic
    from tests.planted.serve_small import model_of, serve_recipe, warm

    tables = dict(row["tables"]) | {"hardware": {"on": "here"}}
    recipe = recipe_from_dict(tables)
    job = recipe.traffic
    assert job is not None
    requests = traffic.mixed(row["requests"], tokens_in=(job.tokens_in,) * 2, tokens_out=(job.tokens_out,) * 2, seed=1)
    at_rate = row["kind"] == "at a rate"
    arrivals = traffic.at_rate(requests, job.requests_per_s, 1) if at_rate else traffic.at_once(requests)
    with mock.patch.object(Transformer, "initialize", drawn_on_device):
        model = model_of(recipe, 0, device)
    warm(recipe, device=device, model=model)
    reading = read_run(serve_recipe(recipe, home, arrivals, device=device, model=model), home)
    (gauge,) = row["predicted"]
    known = reading.get(gauge)
    assert known is not None, f"an engine measures {gauge}"
    return {gauge: known}


# --- the table


def table(drawn: Mapping[str, Any], measured: Mapping[str, Any]) -> int:
    """Predicted beside measured; 1 where the mean error of a table is above its bar."""
    over = False
    for which, bar in BARS.items():
        print(f"\n| {which} | model | gauge | predicted | measured | error |\n|---|---|---|---:|---:|---:|")
        errors = []
        for row, seen in zip(drawn[which], measured.get(which, []), strict=False):
            gauge = next(iter(row["predicted"]))
            name = row["tables"]["model"]["name"]
            if gauge not in seen:
                why = seen.get("failed", "not measured")
                print(f"| {row['kind']} | {name} | {gauge} | {row['predicted'][gauge]:.4g} | {why} | |")
                continue
            errors.append(row["predicted"][gauge] / seen[gauge] - 1)
            cells = f"{row['predicted'][gauge]:.4g} | {seen[gauge]:.4g} | {errors[-1]:+.1%}"
            print(f"| {row['kind']} | {name} | {gauge} | {cells} |")
        off = mean(map(abs, errors)) if errors else float("nan")
        print(f"mean error of {len(errors)}: {off:.1%}, at most {bar:.0%}")
        over |= len(errors) < len(drawn[which]) or not off <= bar
    return int(over)


def commit_of(path: Path) -> str:
    """The commit that holds the predictions; empty where there is no git."""
    if shutil.which("git") is None:
        return ""
    asked = ["git", "log", "-1", "--format=%h %cI", "--", str(path)]
    done = subprocess.run(asked, capture_output=True, text=True, cwd=path.parent)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.h200_tables", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("draw", "train", "serve", "table"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=Path, default=DRAWN, help="the drawing, with its predictions")
    parser.add_argument("--to", type=Path, help="where measurements are written; default: DRAWN.measured.json")
    parser.add_argument("--only", type=int, metavar="N", help="measure configuration N in this process")
    parser.add_argument("--home", type=Path, help="where --only writes its files; default: a folder that is deleted")
    parser.add_argument("--seconds", type=float, default=420, help="no configuration begins after so many")
    asked = parser.parse_args()
    if asked.what == "draw":
        if asked.drawn.exists():
            parser.error(f"{asked.drawn} holds predictions already; name another file with --drawn")
        asked.drawn.write_text(json.dumps(draw(asked.seed), indent=1) + "\n")
        return 0
    drawn = json.loads(asked.drawn.read_text())
    asked.to = asked.to or asked.drawn.with_suffix(".measured.json")
    known = json.loads(asked.to.read_text()) if asked.to.is_file() else {}
    if asked.what == "table":
        return table(drawn, known)
    known["predictions"] = commit_of(asked.drawn)
    if asked.only is not None:
        with tempfile.TemporaryDirectory(prefix="armillary-h200-") as scratch:
            home = Home.at(asked.home or scratch)
            measure_one(asked.what, drawn, known, asked.to, asked.only, home)
    else:
        measure(asked, drawn, known)
    return 0


if __name__ == "__main__":
    sys.exit(main())
