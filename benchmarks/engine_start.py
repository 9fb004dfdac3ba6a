"""From nothing to the first token: a fresh process loads a folder and answers, with a line for every phase.

    python -m benchmarks.engine_start FOLDER [--make qwen3-8b] [--times 2]

`--make` writes the folder first, random weights of that shape with a small tokenizer. Of several times the first may
compile kernels; the last has a warm compile cache and the files in the page cache. JSON comes last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def make(folder: Path, name: str, device: str) -> float:
    """A folder of random weights, and the seconds it took."""
    import torch

    from armillary.model.text.train_tokenizer import train_tokenizer
    from armillary.model.weights.hf_weights import save_model
    from benchmarks.engine_setup import drawn

    begin = time.monotonic()
    model = drawn(name, device, torch.bfloat16)
    with TemporaryDirectory() as like:
        train_tokenizer(["def main():\n    return 0\n"] * 20, 300).save(Path(like))
        save_model(model, folder, template=Path(like))
    return time.monotonic() - begin


def started(folder: Path, since: float, device: str) -> dict[str, float]:
    """In the fresh process: seconds of every phase since the other process asked for it."""
    phases: dict[str, float] = {}
    last = since

    def lap(name: str) -> None:
        nonlocal last
        now = time.time()
        phases[name], last = now - last, now

    lap("Python")
    import torch

    lap("import torch")
    from armillary.engine.llm import LLM
    from armillary.engine.request.sampling_params import SamplingParams
    from armillary.spec.tables.serve import Serve

    lap("import armillary")
    if device == "cuda":
        torch.cuda.init()
        torch.zeros(1, device="cuda")
    lap("CUDA")
    own: dict[str, float] = {}
    llm = LLM(
        folder,
        Serve(max_model_len=1024),
        device=device,
        phase=lambda name, seconds: own.update({name: seconds}),
        record=lambda gauges, **of: None,
    )  # as a server does, which then rehearses
    lap("the rest of LLM(folder)")
    phases["the rest of LLM(folder)"] -= sum(own.values())
    phases |= own
    (made,) = llm.generate(["def main"], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    assert len(made.tokens) == 1, made.error
    lap("first token")
    return phases | {"total": time.time() - since}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.since is not None:
        print(json.dumps(started(args.folder, args.since, args.device)))
        return
    found: dict[str, Any] = {}
    if args.make:
        found["make_s"] = round(make(args.folder, args.make, args.device), 1)
    for turn in range(args.times):
        command = [sys.executable, "-m", "benchmarks.engine_start", str(args.folder), "--device", args.device]
        done = subprocess.run([*command, "--since", str(time.time())], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        phases = json.loads(done.stdout.splitlines()[-1])
        for name, seconds in phases.items():
            print(f"{name:28} {seconds:6.2f} s", flush=True)
        found[f"start {turn + 1}"] = {name: round(seconds, 2) for name, seconds in phases.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
