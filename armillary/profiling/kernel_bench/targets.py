"""Targets of each kernel on an H200, as shares of the ceilings measured in the same run.

A target belongs to some cases of an operation; the bench says whether each is met, by what choose() takes and by our
own kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WIDE = 4096
"""hidden size from which memory-bound kernels have a target"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The least that is required: shares of the ceiling, versions that may not be faster (by how their names begin),
    and memory beyond the gradients and one sum in fp32."""

    forward: float | None = None
    backward: float | None = None
    never_behind: tuple[str, ...] = ()
    extra_bytes: float | None = None

    @property
    def text(self) -> str:
        """'≥ 90/85%, never behind compile'."""
        shares = "/".join(f"{100 * share:.0f}" for share in (self.forward, self.backward) if share is not None)
        parts = [f"≥ {shares}%"] if shares else []
        parts += [f"< {self.extra_bytes / 1e9:.1f} GB extra"] if self.extra_bytes is not None else []
        parts += [f"never behind {', '.join(self.never_behind)}"] if self.never_behind else []
        return ", ".join(parts)


_MEMORY = Target(forward=0.90, backward=0.85, never_behind=("compile", "liger"))
_LOSS = Target(forward=0.75, extra_bytes=1.5e9)


def target_of(op: str, case: Any) -> Target | None:
    """The target for a case of an operation, where there is one."""
    rule = _RULES.get(op)
    return rule(case) if rule is not None and case.device == "cuda" else None


def _wide(columns: Callable[[Any], int]) -> Callable[[Any], Target | None]:
    return lambda case: _MEMORY if columns(case) >= _WIDE else None


def _linear_loss(case: Any) -> Target | None:
    return _LOSS if (case.hidden, case.vocab) == (4096, 131072) and 8192 <= case.tokens <= 32768 else None


def _paged(case: Any) -> Target | None:
    if case.queries != 1 or case.cache:  # a cache in fp8 moves half the bytes, and has no target
        return None
    if case.batch == 256 and 1024 <= case.context <= 8192 and 2 <= case.heads // case.kv_heads <= 8:
        return Target(forward=0.88)
    return Target(forward=0.70) if (case.batch, case.context) == (1, 32768) else None


def _attention(case: Any) -> Target | None:
    plain = not (case.documents or case.window or case.sparse or case.softcap or case.sinks)
    return Target(never_behind=("cudnn",)) if plain and case.head_dim == 128 and case.length == 8192 else None


def _small_linear(case: Any) -> Target | None:
    fits = {case.outputs, case.inputs} == {4096, 14336} and case.tokens in (1, 8, 32)
    return Target(forward=0.85) if fits and not (case.norm or case.gated or case.residual) else None


def _fp8(case: Any) -> Target | None:
    return Target(forward=0.85) if (case.tokens, case.outputs, case.inputs) == (8192, 8192, 8192) else None


def _latent(case: Any) -> Target | None:
    if (case.batch, case.context, case.queries, case.ragged) != (64, 8192, 1, False):
        return None
    return {16: Target(forward=0.80), 128: Target(forward=0.65)}.get(case.heads)


_RULES: dict[str, Callable[[Any], Target | None]] = {
    "norm": _wide(lambda case: case.columns),
    "add_norm": _wide(lambda case: case.columns),
    "rope": _wide(lambda case: case.heads * case.head_dim),
    "activate": _wide(lambda case: case.ffn),
    "linear_cross_entropy": _linear_loss,
    "attention": _attention,
    "paged_attention": _paged,
    "latent_decode": _latent,
    "small_linear": _small_linear,
    "fp8_matmul": _fp8,
}
