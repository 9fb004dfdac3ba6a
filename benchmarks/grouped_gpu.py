"""Grouped products on this GPU, version by version: agreement with the loop over experts, and times in CUDA graphs.

    python benchmarks/grouped_gpu.py [--budget SECONDS]

Versions that a run here would pass over for a quicker one are tried too; one that waits for the device cannot be
captured, and says so. Shapes of training (bf16, rows drawn at random) and of a decoding step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from armillary.kernels.core.choose_version import try_versions
from armillary.kernels.core.op import takes_all
from armillary.kernels.gemm.grouped import GROUPED_LINEAR, GroupedCase
from armillary.machine.accelerator import accelerator_of

CASES = {
    "training, up": GroupedCase(rows=65536, experts=8, outputs=8192, inputs=2048),
    "training, down": GroupedCase(rows=65536, experts=8, outputs=2048, inputs=4096),
    "128 experts": GroupedCase(rows=65536, experts=128, outputs=1536, inputs=2048),
    "decode, 8 of 128 experts, 32 tokens": GroupedCase(rows=256, experts=128, outputs=1536, inputs=2048),
    "decode, one token": GroupedCase(rows=8, experts=128, outputs=1536, inputs=2048),
    "odd sizes": GroupedCase(rows=4001, experts=7, outputs=1001, inputs=515),
}
SKIPPED = {"odd sizes": ("triton", "torch")}
"""rows that are no multiple of 16 bytes"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=0.2)
    arguments = parser.parse_args()
    print(torch.cuda.get_device_name(), accelerator_of(torch.device("cuda")), flush=True)
    for name, case in CASES.items():
        versions = tuple(
            replace(version, refuses=takes_all)
            for version in GROUPED_LINEAR.versions
            if version.name not in SKIPPED.get(name, ())
        )
        op, work = replace(GROUPED_LINEAR, versions=versions), GROUPED_LINEAR.work(case)
        print(f"{name}: {case.label}", flush=True)
        for trial in try_versions(op, case, budget_s=arguments.budget):
            if trial.refused or trial.forward_s is None or trial.backward_s is None:
                print(f"  {trial.version}: {trial.refused or 'not timed'}", flush=True)
                continue
            rates = [
                flops / seconds / 1e12
                for flops, seconds in ((work.flops, trial.forward_s), (work.backward_flops, trial.backward_s))
            ]
            print(
                f"  {trial.version}: forward {1e6 * trial.forward_s:.1f} µs ({rates[0]:.0f} TFLOP/s), backward "
                f"{1e6 * trial.backward_s:.1f} µs ({rates[1]:.0f}), off by {trial.error:.1e}, {trial.method}",
                flush=True,
            )


if __name__ == "__main__":
    main()
