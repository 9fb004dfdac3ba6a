"""What differs between torch 2.11 and 2.13, and private functions of torch, in one place."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch._compile import _disable_dynamo as uncompiled


def collective(new_name: str, old_name: str) -> Any:
    """A function of torch.distributed under its name since 2.13, else under its old one."""
    import torch.distributed as dist

    return getattr(dist, new_name, None) or getattr(dist, old_name)


def fsdp_param_groups(module: Any) -> list[Any]:
    """The parameter groups of an FSDP module; torch 2.13 may have several, 2.11 has one or none."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def load_program(path: Path) -> torch.export.ExportedProgram:
    """An exported program from its file; torch 2.11 warns about read-only buffers, which are never written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.export.load(str(path))


def free_gemm_workspaces() -> None:
    """Give back what torch keeps for cuBLAS, 32 MB on Hopper for each stream that a GEMM ran on. Not while a captured
    CUDA graph with GEMMs is still to be replayed."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:  # a torch without it: the memory stays taken, no more than that
        clear()


__all__ = ["collective", "free_gemm_workspaces", "fsdp_param_groups", "load_program", "uncompiled"]
