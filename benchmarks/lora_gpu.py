"""LoRA on one GPU: memory and step time of the trainer's own parts, beside what the planner says.

    python benchmarks/lora_gpu.py [--rows 4] [--steps 6] [--timed] [--json FILE]

The model is train_one_gpu.py's (1.14 B parameters, sequences of 4,096), frozen in bf16, with fp32 adapters. `--timed`
lets kernels be chosen by timing; otherwise the first that agree are taken.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from train_one_gpu import ours
from train_ours import SMALL
from train_peers import SEQUENCE
from train_predicted import measure_peaks, table

from armillary.spec.catalogue import config_from_fields
from armillary.store.home import Home

CASES: dict[str, dict[str, Any]] = {
    "rank 16, everywhere": {"lora_rank": 16},
    "rank 16, attention only": {"lora_rank": 16, "lora_on": ("qkv", "out")},
    "rank 64, everywhere": {"lora_rank": 64},
    "rank 16, everywhere, selective": {"lora_rank": 16, "kind": "selective"},
    "rank 16, everywhere, full": {"lora_rank": 16, "kind": "full"},
}
"""name -> settings of the job, recompute"""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=4)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--timed", action="store_true")
    options.add_argument("--json", type=Path)
    rows, steps, timed, file = vars(options.parse_args()).values()
    config, home = config_from_fields(SMALL, where="benchmark"), Home.at(tempfile.mkdtemp())
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {rows} rows of {SEQUENCE}", flush=True)
    print(measure_peaks(home), flush=True)
    found: dict[str, Any] = {}
    for name, settings in CASES.items():
        try:
            found[name] = ours(config, home, rows, steps, timed=timed, **settings)
        except (RuntimeError, AssertionError) as error:  # one case must not take the others with it
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}")
        gc.collect()
        torch.cuda.empty_cache()
    print("\n".join(table(found)))
    if file:
        file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
