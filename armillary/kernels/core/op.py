"""Op: an operation with its plain reference, its fast versions, and what is needed to check, time and price them.

A Case is one shape of an op: versions are asked about a case, timed on it and remembered by it. Each op has a file of
its own that ends in `OP = Op(...)`; its Triton kernels are in a second file that only a `LazyFunction` imports, so that
a machine without triton still has the reference.
"""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any, Literal, Self

import torch

from armillary.errors import unknown
from armillary.kernels.core.dtype import DTYPES
from armillary.spec.arithmetic import ops as spec_ops

Ceiling = Literal["copy", "read", "gemm", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of an operation; each op adds its own sizes in a subclass. Hashable and JSON-able."""

    dtype: str = "bf16"  # of the inputs: fp32, bf16, fp16
    device: str = "cuda"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def key(self) -> str:
        """The case as text, by which a choice is stored."""
        return json.dumps(asdict(self) | {"device": torch.device(self.device).type}, sort_keys=True)

    @property
    def label(self) -> str:
        """'8192 × 4096 bf16': sizes and names; sizes of 0 (an absent part) are left out."""
        sizes = [value for name, value in asdict(self).items() if name not in ("dtype", "device")]
        numbers = " × ".join(f"{v}" for v in sizes if v and isinstance(v, int) and not isinstance(v, bool))
        return " ".join([numbers, *(v for v in sizes if isinstance(v, str) and v), self.dtype])

    def normal(self, generator: torch.Generator, *shape: int) -> torch.Tensor:
        """A random tensor for this case: normal(0, 1) in its dtype."""
        return torch.randn(shape, generator=generator, device=generator.device).to(self.torch_dtype)


@dataclass(frozen=True, kw_only=True)
class OpWork:
    """FLOPs and compulsory bytes of a case, and the measured ceiling that it is compared with."""

    flops: float  # of the forward pass; a multiply-add counts as two
    bytes: float  # of the forward pass
    backward_flops: float = 0.0
    backward_bytes: float = 0.0
    ceiling: Ceiling = "copy"  # copy and read: bytes/s of memory; gemm and fp8: FLOP/s of GEMMs
    joint: bool = False  # compare forward and backward as one: versions differ in which computes the gradients

    @classmethod
    def of(cls, forward: spec_ops.Op, *backward: spec_ops.Op, ceiling: Ceiling = "copy") -> Self:
        """From the operations that the planner and the profiler count with."""
        flops, moved = spec_ops.total(backward)
        return cls(
            flops=forward.flops, bytes=forward.bytes, backward_flops=flops, backward_bytes=moved, ceiling=ceiling
        )


class LazyFunction:
    """A function that is imported at its first call: `LazyFunction("armillary.kernels.x_triton", "x")`."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def load(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(self.module), self.name)
        return function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.load()(*args, **kwargs)


_CHECKED_ON_CPU = 1 << 20
_BYTES_PER_ELEMENT = 96  # memory of a check: inputs, outputs and gradients, in the case's dtype and wide


def rows_to_check(case: Case, rows: int, elements_per_row: int) -> int:
    """All rows where the wide reference fits into free memory, else as many as fit; for `Op.small`."""
    elements = _CHECKED_ON_CPU
    if torch.device(case.device).type == "cuda":
        elements = int(torch.cuda.mem_get_info(torch.device(case.device))[0]) // _BYTES_PER_ELEMENT
    return min(rows, max(16, elements // max(1, elements_per_row)))


def takes_all(case: Any) -> str | None:
    """The default of Version.refuses."""
    return None


def refuses_fp64(case: Case) -> str | None:
    """For kernels that compute in fp32."""
    return None if case.dtype in ("fp32", "bf16", "fp16") else f"{case.dtype} is left to the reference"


@dataclass(frozen=True, kw_only=True)
class Version:
    """One implementation of an op, with the reference's signature."""

    name: str  # 'triton', 'compile', 'cudnn', 'liger' …; 'eager' is the reference
    run: Callable[..., Any]  # or a LazyFunction; correct for any number of rows or tokens, not only the case's
    refuses: Callable[[Any], str | None] = takes_all  # why it cannot do a case, or None
    needs: tuple[str, ...] = ()  # see requirements.py: 'triton', 'compile', 'cuda', 'liger' …
    deterministic: bool = True  # whether the same inputs give the same bits every time

    def load(self) -> Callable[..., Any]:
        """The function itself, imported or compiled."""
        return self.run.load() if isinstance(self.run, LazyFunction) else self.run


def in_triton(
    module: str,
    function: str,
    *,
    name: str = "triton",
    refuses: Callable[[Any], str | None] = refuses_fp64,
    needs: tuple[str, ...] = (),
) -> Version:
    """Our own kernel: `function` of armillary.kernels.`module`; `needs` beside triton."""
    run = LazyFunction(f"armillary.kernels.{module}", function)
    return Version(name=name, run=run, refuses=refuses, needs=("triton", *needs))


def in_liger(function: str, refuses: Callable[[Any], str | None] = takes_all) -> Version:
    """`function` of liger.py, where liger_kernel is installed."""
    run = LazyFunction("armillary.kernels.core.liger", function)
    return Version(name="liger", run=run, refuses=refuses, needs=("liger",))


# --- by torch.compile: static shapes, a compiler cache per load


class Compiled(LazyFunction):
    """torch.compile(function) on load. The compiler keeps its cache on a function's code object and gives up after
    eight shapes; a copy of the code per load keeps cases apart."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def load(self) -> Callable[..., Any]:
        source: Any = self.function
        code = source.__code__.replace()
        copy = FunctionType(code, source.__globals__, source.__name__, source.__defaults__, source.__closure__)
        copy.__kwdefaults__ = source.__kwdefaults__
        return _quiet(torch.compile(copy, dynamic=False))


def compiled(function: Callable[..., Any]) -> Version:
    """The torch.compile version of an op."""
    return Version(name="compile", run=Compiled(function), needs=("compile",))


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """Silence the compiler's warnings about settings that are chosen deliberately (tf32 off, no autotuning)."""
    done = False

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal done
        if done:
            return function(*args, **kwargs)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(*args, **kwargs)
        done = True
        return result

    return run


@dataclass(frozen=True, kw_only=True)
class Op:
    """An operation."""

    name: str
    reference: Callable[..., Any]  # plain torch, any dtype up to fp64, sums at least in fp32; one tensor or a tuple
    versions: tuple[Version, ...]  # the fast ones, preferred first where nothing may be timed; 'eager' is appended
    inputs: Callable[[Any, torch.Generator], tuple[Any, ...]]  # random arguments for a case, on the generator's device
    work: Callable[[Any], OpWork]
    grads: tuple[int, ...] = ()  # arguments that get gradients (None in a case: skipped); () for inference only
    rivals: tuple[Version, ...] = ()  # timed in the bench but never chosen: they do not do quite the same
    writes: tuple[int, ...] = ()  # arguments changed in place: the op returns them, and compared runs get copies
    tolerance: Mapping[str, float] = field(default_factory=dict)  # dtype -> relative error, if not agreement.py's
    cases: Mapping[str, Case] = field(default_factory=dict)  # named shapes of real models, for the bench
    reference_refuses: Callable[[Any], str | None] = takes_all  # why it is not timed where another agrees
    small: Callable[[Any], Any] = lambda case: case  # with fewer rows where the wide reference would not fit memory

    @property
    def all_versions(self) -> tuple[Version, ...]:
        """The fast ones, then the reference."""
        return (*self.versions, Version(name="eager", run=self.reference, refuses=self.reference_refuses))

    def version(self, name: str) -> Version | None:
        return next((version for version in self.all_versions if version.name == name), None)


# all operations, as `bench kernels` lists them: name -> module and attribute that hold its Op
OPS: dict[str, str] = {
    "norm": "norm.norm:NORM",
    "add_norm": "norm.norm:ADD_NORM",
    "rope": "pointwise.rope:ROPE",
    "activate": "pointwise.activation:ACTIVATE",
    "linear_cross_entropy": "loss.linear_cross_entropy:LINEAR_CROSS_ENTROPY",
    "attention": "attention.attention:ATTENTION",
    "simplicial": "simplicial.simplicial:SIMPLICIAL",
    "paged_simplicial": "simplicial.paged:PAGED_SIMPLICIAL",
    "small_linear": "gemm.skinny:SMALL_LINEAR",
    "large_linear": "gemm.large_linear:LARGE_LINEAR",
    "small_moe": "moe.moe:SMALL_MOE",
    "grouped_moe": "moe.moe:GROUPED_MOE",
    "dequantise_stack": "moe.packed_stack:DEQUANTISE_STACK",
    "grouped_linear": "gemm.grouped:GROUPED_LINEAR",
    "fp8_linear": "fp8.linear:FP8_LINEAR",
    "fp8_matmul": "fp8.matmul:FP8_MATMUL",
    "weight_only_linear": "quantized.weight_only:WEIGHT_ONLY",
    "block_fp8_linear": "quantized.block_fp8:BLOCK_FP8",
    "paged_attention": "paged.paged_attention:PAGED_ATTENTION",
    "qkv_cache": "paged.qkv_to_cache:QKV_CACHE",
    "latent_decode": "latent.latent_decode:LATENT_DECODE",
    "latent_prefill": "latent.latent_prefill:LATENT_PREFILL",
    "latent_to_cache": "latent.latent_to_cache:LATENT_TO_CACHE",
    "delta_rows": "delta.delta_rows:DELTA_ROWS",
    "add_lora": "lora.grouped_lora:LORA",
    "sample": "sampling.sampling:SAMPLE",
    "logprobs": "sampling.logprobs:LOGPROBS",
}


def find_op(name: str) -> Op:
    if name not in OPS:
        raise unknown("operation", name, OPS)
    module, _, attribute = OPS[name].partition(":")
    op = getattr(import_module(f"armillary.kernels.{module}"), attribute)
    assert isinstance(op, Op) and op.name == name, f"{OPS[name]} is not the op {name}"
    return op
