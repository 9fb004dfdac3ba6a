"""What kernels must know of a GPU before they are offered there: vendor, compute capability, shared memory, units.

One place asks torch, because its answers mislead: on ROCm `torch.cuda.get_device_capability()` gives (9, 4) for an
MI300, which is no Hopper. Everything else asks here.
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
"""compute capability -> most shared memory of a block (opt-in); CUDA C++ programming guide 13, table of technical
specifications per compute capability"""
_EVERY_CHIP_HAS = 48 << 10
"""shared memory of a block without opting in"""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU."""

    vendor: Literal["nvidia", "amd"]
    """who made it"""
    arch: str
    """what compilers call it: sm_90, gfx942"""
    capability: Capability
    """NVIDIA's compute capability; (0, 0) for other vendors, whose numbers mean something else"""
    shared_bytes: int
    """most shared memory that one block may use"""
    multiprocessors: int
    """that run blocks at the same time"""

    def has_capability(self, least: Capability) -> bool:
        """Whether it is an NVIDIA chip of this compute capability or a later one."""
        return self.vendor == "nvidia" and self.capability >= least

    @property
    def tma(self) -> bool:
        """Whether tiles can be copied by descriptor (Tensor Memory Accelerator)."""
        return self.has_capability((9, 0))

    @property
    def early_launch(self) -> bool:
        """Whether a kernel may be set up while the one ahead still runs (programmatic dependent launch)."""
        return self.has_capability((9, 0))

    @property
    def fp8(self) -> bool:
        """Whether matrix units multiply E4M3 and E5M2; AMD's MI300 has other fp8 formats (FNUZ)."""
        return self.has_capability((8, 9))

    @property
    def grouped_gemm(self) -> bool:
        """Whether torch's grouped GEMM has a kernel: on other chips it reads the groups' sizes on the host."""
        return self.vendor == "nvidia" and self.capability[0] in (9, 10)


def of_nvidia(capability: Capability, *, shared_bytes: int = 0, multiprocessors: int = 1) -> Accelerator:
    """A chip of this compute capability; its shared memory by the table where the driver does not say."""
    shared = shared_bytes or SHARED_BYTES.get(capability) or _EVERY_CHIP_HAS
    return Accelerator(
        vendor="nvidia",
        arch=f"sm_{capability[0]}{capability[1]}",
        capability=capability,
        shared_bytes=shared,
        multiprocessors=multiprocessors,
    )


@cache
def accelerator_of(device: torch.device) -> Accelerator | None:
    """The GPU behind a torch device; None for a CPU. Without an index it is the current one of the first call."""
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
