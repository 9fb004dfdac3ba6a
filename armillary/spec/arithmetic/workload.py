"""Workload: the operations of one forward and backward pass of a ModelConfig, in execution order.

Their sum is the work of the model, and each is a row of a profile.
"""

from collections.abc import Sequence
from dataclasses import replace

from armillary.spec.arithmetic import non_gemm_ops
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.sublayers import (
    Batch,
    OpWithBackward,
    add,
    attention_operations,
    linear,
    mlp_operations,
    moe_operations,
    norm,
)
from armillary.spec.model import LayerKind, ModelConfig


def even_lengths(tokens: int, sequence: int) -> list[int]:
    """`tokens` as sequences of `sequence`, the last shorter where it does not divide."""
    full, rest = divmod(tokens, sequence)
    return [sequence] * full + [rest] * (rest > 0)


def make_batch(
    lengths: Sequence[int],
    *,
    cached: Sequence[int] | None = None,
    logits: int | None = None,
    dtype: str = "bf16",
    weight_dtype: str = "",
    kv_dtype: str = "",
    flash: bool = True,
) -> Batch:
    """New tokens of each sequence after its `cached` tokens: make_batch(even_lengths(tokens, sequence))
    is a training step, make_batch([1] * 64, cached=[1000] * 64) a decode step. The head has `logits` rows: all of them,
    unless given (serving: one per sequence)."""
    past = cached if cached is not None else [0] * len(lengths)
    spans = tuple((length, before + length) for length, before in zip(lengths, past, strict=True))
    return Batch(
        spans=spans,
        logits=sum(lengths) if logits is None else logits,
        dtype=dtype,
        weight_dtype=weight_dtype,
        kv_dtype=kv_dtype,
        flash=flash,
    )


def forward_ops(config: ModelConfig, batch: Batch, *, loss: bool = False) -> list[Op]:
    """Every operation of one forward pass in order, output projection included (`loss`: cross-entropy too)."""
    return [operation.forward for operation in model_operations(config, batch, loss=loss)]


def model_operations(config: ModelConfig, batch: Batch, *, loss: bool = False) -> list[OpWithBackward]:
    """Embedding, layers and head; a layer's names start with 'layers.N.'."""
    by_kind = {kind: layer_operations(config, kind, batch) for kind in dict.fromkeys(config.layers)}
    result = embedding_operations(config, batch)
    for i, kind in enumerate(config.layers):
        result += [_renamed(operation, f"layers.{i}.") for operation in by_kind[kind]]
    return result + head_operations(config, batch, loss=loss)


def _renamed(operation: OpWithBackward, prefix: str) -> OpWithBackward:
    backward = tuple(replace(op, name=prefix + op.name) for op in operation.backward)
    return OpWithBackward(forward=replace(operation.forward, name=prefix + operation.forward.name), backward=backward)


# --- embedding and head


def embedding_operations(config: ModelConfig, batch: Batch) -> list[OpWithBackward]:
    names = ["embedding", "positions"] if config.positions == "learned" else ["embedding"]
    rows = {"embedding": config.vocab, "positions": config.learned_positions}
    return [
        OpWithBackward(
            forward=non_gemm_ops.embedding(name, batch.tokens, config.hidden, dtype=batch.dtype),
            backward=(
                non_gemm_ops.embedding_backward(
                    f"{name}.d", batch.tokens, config.hidden, rows[name], dtype=batch.dtype
                ),
            ),
        )
        for name in names
    ]


def head_operations(config: ModelConfig, batch: Batch, *, loss: bool) -> list[OpWithBackward]:
    result = [norm(config, "final_norm", batch, residual=False)] if config.final_norm else []
    result.append(linear("head", replace(batch, spans=((batch.logits, batch.logits),)), config.vocab, config.hidden))
    if loss:
        forward = non_gemm_ops.cross_entropy("loss", batch.logits, config.vocab, dtype=batch.dtype)
        backward = non_gemm_ops.cross_entropy_backward("loss.d", batch.logits, config.vocab, dtype=batch.dtype)
        result.append(OpWithBackward(forward=forward, backward=(backward,)))
    return result


# --- one layer


def layer_operations(config: ModelConfig, kind: LayerKind, batch: Batch) -> list[OpWithBackward]:
    """One layer of `kind`: norms, attention and MLP, in the order of config.norm_at and config.parallel."""
    attend = attention_operations(config, kind, batch)
    if kind.mlp == "moe":
        assert config.moe is not None
        mlp = moe_operations(config, config.moe, batch)
    else:
        mlp = mlp_operations(config, batch, config.ffn, "mlp", gated=config.gated)
    if config.parallel != "none":
        norms = [norm(config, "norm", batch, residual=True)]
        norms += [norm(config, "mlp_norm", batch, residual=False)] if config.parallel == "two_norms" else []
        return norms + attend + mlp + [add("branches", config, batch)]
    return _with_norms(config, "attention", attend, batch) + _with_norms(config, "mlp", mlp, batch)


def _with_norms(config: ModelConfig, name: str, inner: list[OpWithBackward], batch: Batch) -> list[OpWithBackward]:
    """The residual add is fused into the norm before (of this sub-layer or the next); alone where there is none."""
    if config.norm_at == "after":
        return [*inner, norm(config, f"{name}_norm", batch, residual=False), add(f"{name}_residual", config, batch)]
    after = [norm(config, f"{name}_post_norm", batch, residual=False)] if config.norm_at == "both" else []
    return [norm(config, f"{name}_norm", batch, residual=True), *inner, *after]
