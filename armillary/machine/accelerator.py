"""Properties of a GPU that decide which kernels run on it: vendor, compute capability, shared memory, units.

Only this module asks torch, whose values mislead: on ROCm `torch.cuda.get_device_capability()` is (9, 4) for an MI300,
which is no Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Capability = tuple[int, int]

SHARED_BYTES: dict[Capability, int] = {
    (7, 0): 96 << 10,
    (7, 5): 64 << 10,
    (8, 0): 163 << 10,
    (8, 6): 99 << 10,
    (8, 7): 163 << 10,
    (8, 9): 99 << 10,
    (9, 0): 227 << 10,
    (10, 0): 227 << 10,
    (10, 3): 227 << 10,
    (11, 0): 227 << 10,
    (12, 0): 99 << 10,
    (12, 1): 99 << 10,
}
"""compute capability -> largest shared memory per block (opt-in); CUDA C++ programming guide 13, table of technical
specifications per compute capability"""
_MIN_SHARED_BYTES = 48 << 10
"""shared memory per block without opting in"""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU; `arch` is the compilers' name (sm_90, gfx942), `shared_bytes` the largest shared memory per block."""

    vendor: Literal["nvidia", "amd"]
    arch: str
    capability: Capability
    """NVIDIA's compute capability; (0, 0) for other vendors, whose numbers mean something else"""
    shared_bytes: int
    multiprocessors: int

    def has_capability(self, least: Capability) -> bool:
        """Whether it is an NVIDIA chip of at least this compute capability."""
        return self.vendor == "nvidia" and self.capability >= least

    @property
    def tma(self) -> bool:
        """Whether tiles can be copied by descriptor (Tensor Memory Accelerator)."""
        return self.has_capability((9, 0))

    @property
    def wgmma(self) -> bool:
        """Whether it has Hopper's warpgroup MMAs, which no later chip has."""
        return self.vendor == "nvidia" and self.capability == (9, 0)

    @property
    def early_launch(self) -> bool:
        """Whether a kernel may start while the previous one still runs (programmatic dependent launch)."""
        return self.has_capability((9, 0))

    @property
    def fp8(self) -> bool:
        """Whether tensor cores multiply E4M3 and E5M2; AMD's MI300 has other fp8 dtypes (FNUZ)."""
        return self.has_capability((8, 9))

    @property
    def grouped_gemm(self) -> bool:
        """Whether torch's grouped GEMM has a kernel: on other chips it reads the groups' sizes on the host."""
        return self.vendor == "nvidia" and self.capability[0] in (9, 10)


def of_nvidia(capability: Capability, *, shared_bytes: int = 0, multiprocessors: int = 1) -> Accelerator:
    """A chip of this compute capability; its shared memory from the table where the driver does not report it."""
    shared = shared_bytes or SHARED_BYTES.get(capability) or _MIN_SHARED_BYTES
    return Accelerator(
        vendor="nvidia",
        arch=f"sm_{capability[0]}{capability[1]}",
        capability=capability,
        shared_bytes=shared,
        multiprocessors=multiprocessors,
    )


@cache
def accelerator_of(device: torch.device) -> Accelerator | None:
    """The GPU of a torch device; None for a CPU. Without an index, the current GPU at the first call."""
    import torch

    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    multiprocessors = int(properties.multi_processor_count)
    if torch.version.hip is not None:
        shared = int(getattr(properties, "shared_memory_per_block", 0)) or 64 << 10
        arch = str(getattr(properties, "gcnArchName", "gfx")).partition(":")[0]
        return Accelerator(
            vendor="amd", arch=arch, capability=(0, 0), shared_bytes=shared, multiprocessors=multiprocessors
        )
    shared = int(getattr(properties, "shared_memory_per_block_optin", 0))
    capability = (int(properties.major), int(properties.minor))
    return of_nvidia(capability, shared_bytes=shared, multiprocessors=multiprocessors)
