"""Rows of the agreement table on GPUs: several ranks that share one over gloo, or one GPU for each rank over NCCL.

    python -m tests.ranks_on_gpus [--ranks 2] [STRATEGY …]      # `make test-nccl`: NCCL, prints the table to paste
    python -m tests.ranks_on_gpus --shared --ranks 4            # gloo, all ranks on the first GPU

A row is a strategy of `training.parity`: a few steps of a tiny model in fp32 and bf16, and the largest relative
difference of a loss from one process on the same GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from armillary.training.parity.case import error, steps
from armillary.training.parity.matrix import alone, cases_of
from armillary.training.parity.strategies import layout_of
from tests.gpu_through_host import through_host

BARS = {"fp32": 1e-6, "bf16": 1e-3}
"""largest relative difference of a loss"""
STRATEGIES = (
    "DDP",
    "ZeRO-1",
    "ZeRO-2",
    "ZeRO-3 (FSDP2)",
    "HSDP",
    "tp + sp",
    "FSDP2 × tp",
    "pp (GPipe)",
    "pp (1F1B)",
    "pp (interleaved)",
    "pp (zero-bubble)",
    "cp",
    "experts: ep",
    "experts: ep × FSDP2",
)


def rows_on(world: int) -> list[str]:
    """The strategies that have a use for so many ranks."""
    return [name for name in STRATEGIES if layout_of(name, world) is not None]


def measure(strategy: str, world: int, device: str, precisions: tuple[str, ...] = ("fp32", "bf16")) -> dict[str, float]:
    """Largest difference of a loss by precision; on every rank, of which only the first compares."""
    found = {}
    for precision in precisions:
        case = replace(cases_of(strategy, world, ("fp32",))[0], steps=5, device=device)
        case = replace(case, layout=replace(case.layout, precision=precision))  # type: ignore[arg-type]
        outcome = steps(case)
        if dist.get_rank() == 0:
            one = replace(case.alone(), device="cuda:0" if device.startswith("cuda") else device)
            found[precision] = error(outcome, alone(one))["loss"]
    return found


def line(strategy: str, world: int, found: dict[str, float] | str, where: str) -> str:
    """A row of the table; a text is the reason why there are no figures."""
    if isinstance(found, str):
        return f"| {strategy} | {world} | – | – | no: {found} | {where} |"
    holds = all(found[precision] <= bar for precision, bar in BARS.items())
    figures = " | ".join(f"{found[precision]:.1e}" for precision in BARS)
    return f"| {strategy} | {world} | {figures} | {'yes' if holds else 'no'} | {where} |"


# --- by hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="all ranks on the first GPU, over gloo")
    parser.add_argument("strategies", nargs="*", default=[])
    options = parser.parse_args()
    count = torch.cuda.device_count()
    if count < (1 if options.shared else options.ranks):
        raise SystemExit(f"{options.ranks} ranks need as many GPUs and there are {count}; add --shared for one GPU")
    print("| strategy | ranks | loss fp32 | loss bf16 | holds | ran on |\n|---|--:|--:|--:|---|---|")
    for name in options.strategies or rows_on(options.ranks):
        with tempfile.TemporaryDirectory() as folder:  # ranks of its own for each row: one that fails is one line
            try:
                mp.spawn(_rank, (name, options.ranks, options.shared, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
            except Exception as reason:
                print(line(name, options.ranks, str(reason).strip().splitlines()[-1][:80], ""), flush=True)


def _rank(rank: int, strategy: str, world: int, shared: bool, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if shared else "cpu:gloo,cuda:nccl",
        store=dist.FileStore(str(Path(folder) / "store"), world),
        rank=rank,
        world_size=world,
        device_id=None if shared else device,
    )
    try:
        with through_host() if shared else nullcontext():
            found = measure(strategy, world, str(device))
    except Exception:
        traceback.print_exc()
        raise
    if rank == 0:
        where = f"{'gloo, ranks share one' if shared else 'NCCL,'} {torch.cuda.get_device_name(0)}"
        print(line(strategy, world, found, where), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
