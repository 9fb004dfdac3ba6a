"""What dynamic batching buys the predict server: the highest rate it sustains at one limit of p99, batched and not.

    python benchmarks/predict_batching.py                  an MLP and a small ResNet; under two minutes on two cores
    python benchmarks/predict_batching.py --only mlp       one of them
    python benchmarks/predict_batching.py --speeds         eager, compiled, exported, TorchScript and ONNX, a row and 32
    python benchmarks/predict_batching.py --write          either, also into predict_batching.md

The server is a process of its own, asked over HTTP by an open-loop Poisson client in this one; a rate counts where its
p99, from when a request was due, stays within the limit, nothing fails and no queue grows.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path

import torch

from armillary.machine.machine import machine
from armillary.model.export_graph import export, inputs_like
from armillary.model.user_module import load_python_module
from armillary.serving.load.probe import probe
from armillary.serving.load.rate_search import SearchResult, rate_runner, search_rate
from armillary.serving.load.run import LoadTest
from armillary.serving.predict.model import open_file
from armillary.spec.tables.serve import Predict
from armillary.spec.tables.traffic import Load, Objective, Traffic

EXAMPLES = Path(__file__).parent.parent / "examples" / "small_models.py"
LIMITS_S = {"mlp": 0.2, "resnet": 0.2}
BATCH = 64
PAGE = Path(__file__).with_suffix(".md")
BATCHING, FORMS = "Dynamic batching", "Forms of a model"
INTRO = """`python benchmarks/predict_batching.py --write` for the first table, `--speeds --write` for the second.
Models: `examples/small_models.py`. The rate is the highest that an open-loop Poisson client over HTTP sustains with
p99, from when a request was due, within the limit; client, server and model share the cores."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=LIMITS_S)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each trial")
    parser.add_argument("--speeds", action="store_true", help="forms of a model instead of a server")
    parser.add_argument("--write", action="store_true", help="put the tables into predict_batching.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    names = [asked.only] if asked.only else list(LIMITS_S)
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            made = speeds(name, Path(folder)) if asked.speeds else compare(name, Path(folder), asked.seconds)
            for line in made:
                print(line, flush=True)
                lines.append(line)
    if asked.write:
        write(FORMS if asked.speeds else BATCHING, lines)


def write(title: str, lines: list[str]) -> None:
    """Replace the part of the page under `title`, and keep the other."""
    parts = {BATCHING: "", FORMS: ""}
    for part in (PAGE.read_text(encoding="utf-8") if PAGE.exists() else "").split("\n## ")[1:]:
        parts |= {name: part.partition("\n")[2].strip() for name in parts if part.startswith(name)}
    cpu = machine().cpu
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    head = f"{date.today()}, {software}, {cpu.model}, {cpu.cores} cores; the model has one thread."
    parts[title] = "\n".join([head, *lines])
    body = "\n\n".join(f"## {name}\n\n{text}" for name, text in parts.items() if text)
    PAGE.write_text(f"# The predict server\n\n{INTRO}\n\n{body}\n", encoding="utf-8")


# --- the server, batched and not


def compare(name: str, folder: Path, seconds: float) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    module, examples = load_python_module(f"{EXAMPLES}:{name}")
    file = export(module, inputs_like(examples), folder / f"{name}.pt2", "pt2").path
    alone = _least(lambda: module(examples[0][:1]))
    yield f"\n{name}: one row alone {1e3 * alone:.2f} ms, p99 limit {1e3 * LIMITS_S[name]:.0f} ms\n"
    yield "| batching | highest rate, requests/s | p50 ms | p99 ms | mean rows | next rate fails by |"
    yield "|---|---:|---:|---:|---:|---|"
    found = {}
    for title, batch, start in (("none", 1, 0.5 / alone), (f"dynamic, up to {BATCH}", BATCH, 1.5 / alone)):
        with server(file, batch) as url:
            found[title] = highest(url, LIMITS_S[name], start, seconds)
            yield row(title, found[title], mean_rows(url))
    none, dynamic = (one.best or 0.0 for one in found.values())
    yield f"\ndynamic over none: {dynamic / none if none else float('inf'):.1f} × at the same limit"


def highest(url: str, limit_s: float, start: float, seconds: float) -> SearchResult:
    traffic = Traffic(requests_per_s=start, duration_s=seconds, tokens_in=1, tokens_out=1)
    load, objective = Load(api="predict", warmup_s=0.3, timeout_s=20.0), Objective(e2e_p99_s=limit_s)
    test = LoadTest(traffic=traffic, load=load, objective=objective)
    return search_rate(rate_runner(probe(url, load), test), objective, start=start, resolution=1.15)


def row(title: str, found: SearchResult, rows: float) -> str:
    best = found.run.summary
    failed = next((one for one in reversed(found.attempts) if one.requests_per_s == found.failed), None)
    why = f"{failed.requests_per_s:.0f}/s: {'; '.join(failed.violations)}" if failed else "–"
    return (
        f"| {title} | {found.best or 0:.0f} | {1e3 * best.due_e2e.p50_s:.1f} | {1e3 * best.due_e2e.p99_s:.1f} | "
        f"{rows:.1f} | {why} |"
    )


def mean_rows(url: str) -> float:
    """Rows of a batch over all trials, from the server's own counters."""
    import urllib.request

    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    total, count = (float(re.search(rf"batch_rows_{key} (\S+)", text)[1]) for key in ("sum", "count"))  # type: ignore[index]
    return total / count


@contextmanager
def server(file: Path, max_batch: int) -> Iterator[str]:
    command = [
        sys.executable,
        "-m",
        "armillary",
        "serve",
        str(file),
        "--trust",  # written by this script, not by `armillary convert`
        "--port",
        "0",
        "--set",
        "predict.threads=1",
        "--set",
        f"predict.max_batch={max_batch}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (re.search(r"ready on (http://\S+)/predict", line) for line in process.stdout)
            found = next(filter(None, lines), None)
            if found is None:
                raise SystemExit("the server did not start")
            yield found[1]
        finally:
            process.terminate()
            process.wait(30)


# --- eager, compiled, exported


def speeds(name: str, folder: Path) -> Iterator[str]:
    """Time of one row and of 32 rows, for every form of the same model; compiling takes longest and comes last."""
    module, examples = load_python_module(f"{EXAMPLES}:{name}")
    pt2 = export(module, inputs_like(examples), folder / f"{name}.pt2", "pt2").path
    forms: dict[str, Callable[[], Callable[[torch.Tensor], object]]] = {
        "eager": lambda: module,
        "exported (.pt2)": lambda: _served(pt2, Predict(threads=1)),
        "TorchScript (.pt)": lambda: _served(_traced(module, examples[0], folder / f"{name}.pt"), Predict(threads=1)),
        "ONNX (onnxruntime)": lambda: _served(
            export(module, inputs_like(examples), folder / f"{name}.onnx", "onnx").path, Predict(threads=1)
        ),
        "compiled": lambda: torch.compile(module, dynamic=True),
        "exported, compiled": lambda: _served(pt2, Predict(threads=1, compile=True)),
    }
    one = examples[0][:1]
    many = one.repeat(32, *[1] * (one.ndim - 1))
    yield f"\n| {name} | one row, ms | 32 rows, ms |\n|---|---:|---:|"
    for title, make in forms.items():
        call = make()
        times = [_least(partial(call, batch)) for batch in (one, many)]
        yield f"| {title} | {1e3 * times[0]:.2f} | {1e3 * times[1]:.2f} |"


def _traced(module: torch.nn.Module, example: torch.Tensor, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still served
        torch.jit.trace(module, (example,)).save(str(path))
    return path


def _served(file: Path, settings: Predict) -> Callable[[torch.Tensor], object]:
    """The model as the server runs it, arrays in and out."""
    model = open_file(file, settings).model
    return lambda x: model.run([x.numpy()])


def _least(call: Callable[[], object], seconds: float = 1.0) -> float:
    """The quickest of the calls of a second, after three to warm up."""
    with torch.inference_mode():
        for _ in range(3):
            call()
        best, end = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < end:
            begin = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
