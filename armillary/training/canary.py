"""The canary: a short deterministic run of a plan, as values that can be compared with those of another day or machine.

It trains as a run does, with the plan's model, data, layout and precision, but times no kernels, writes nothing, and
stops after a few steps.
"""

from __future__ import annotations

import platform
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

import armillary
from armillary.machine.cores import compute_threads
from armillary.machine.device_name import device_name
from armillary.parallel.ddp import local_of
from armillary.parallel.world import World
from armillary.spec.plan import Plan
from armillary.store.canary import CanaryRecord, CanaryStep
from armillary.training.loop import make_consensus
from armillary.training.step.numerics import numerics, seed
from armillary.training.step.optimizer import weights_by_name
from armillary.training.telemetry.step_telemetry import NullTelemetry
from armillary.training.trainer import Trainer


def run_canary(plan: Plan, world: World, num_steps: int) -> CanaryRecord:
    """Called by every rank."""
    job, ranks = plan.train, make_consensus(world)
    assert job is not None and job.deterministic, "a plan for a deterministic run"
    steps = []
    with (
        numerics(tf32=plan.layout.precision == "tf32", deterministic=True),
        Trainer(plan, world, ranks, telemetry=NullTelemetry) as trainer,
    ):
        seed(job.seed, world.rank)
        for number in range(num_steps):
            report = trainer.step(number)
            assert report is not None, "nobody asks it to stop"
            values = report.gauges
            steps.append(
                CanaryStep(loss=values["loss"], grad_norm=values["grad_norm"], batch_checksum=values["batch_checksum"])
            )
        trainer.offloaded.finish()
        weights = _checksum(trainer)
    return CanaryRecord(
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        recipe=plan.recipe,
        precision=plan.layout.precision,
        steps=tuple(steps),
        weights=weights,
        code=code(),
        versions=versions(),
        device=_device(plan, world, trainer.choices.names),
    )


def _checksum(trainer: Trainer) -> str:
    """Of the trained weights of all ranks, in order: bit for bit, and only for this layout."""
    digest = blake2b(digest_size=16)
    weights = weights_by_name(trainer.model, trainer.optimizer, trainer.sharded.full_name)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(local_of(tensor).detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    of_all = blake2b("".join(trainer.ranks.gather(digest.hexdigest())).encode(), digest_size=16)
    return of_all.hexdigest()


def code() -> dict[str, str]:
    """The version of this package, and a checksum of its source."""
    root = Path(armillary.__file__).parent
    digest = blake2b(digest_size=8)
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return {"armillary": armillary.__version__, "source": digest.hexdigest()}


def versions() -> dict[str, str]:
    known: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        known |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        known["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        known["driver"] = _driver()
    return {name: str(value) for name, value in known.items()}


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.is_file() else ""
    return next((word for word in text.split() if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def _device(plan: Plan, world: World, kernels: Any) -> dict[str, str]:
    layout = plan.layout
    return {
        "device": device_name(world.device, threads=compute_threads(world.size)),
        "layout": f"{layout.text()}, zero {layout.zero}, micro-batches of {layout.micro_batch}",
        "precision": layout.precision,
        "kernels": ", ".join(f"{key} {value}" for key, value in sorted(dict(kernels).items())) or "torch",
    }
