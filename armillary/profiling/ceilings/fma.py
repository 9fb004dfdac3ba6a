"""Plain multiply-adds, as many as the device can do without its matrix units: the other compute ceiling.

Norms, softmaxes and activations run there. The loop needs a compiler for the device (Triton); on a CPU the fp32
GEMM runs on the same units, so it is the ceiling.
"""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from armillary.kernels.core.random_inputs import random_row
from armillary.profiling.ceilings.settings import Settings

_ELEMENTS = 1 << 24
_ROUNDS = 1024


def cases(settings: Settings) -> list[dict[str, Any]]:
    """One, where there is Triton and a GPU."""
    return [{"dtype": "fp32"}] if settings.on_cuda and find_spec("triton") is not None else []


def measure(chosen: Iterable[dict[str, Any]], settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """A chain of x = x·a + b for each element, in registers."""
    import torch

    from armillary.profiling.ceilings.fma_triton import chain

    for case in chosen:
        row = random_row(_ELEMENTS, torch.float32, settings.device)
        timing = settings.time(lambda row=row: chain(row, _ROUNDS))  # type: ignore[misc]
        yield "fma", settings.point(case, timing, {"flops": 2.0 * _ELEMENTS * _ROUNDS / timing.seconds}, units="plain")
