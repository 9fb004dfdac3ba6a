"""Bytes and FLOPs of what surrounds the matrix products."""

from __future__ import annotations

from typing import get_args

import pytest

from armillary.spec.arithmetic import non_gemm_ops as ops
from armillary.spec.model import Activation


def test_norms_move_what_they_read_and_write() -> None:
    plain = ops.norm("n", 10, 64, dtype="bf16")
    assert (plain.bytes_read, plain.bytes_written, plain.flops) == (1280 + 128, 1280, 4 * 640)
    fused = ops.norm("n", 10, 64, dtype="bf16", residual=True)
    assert (fused.bytes_read, fused.bytes_written) == (2560 + 128, 2560)
    assert ops.norm("n", 10, 64, dtype="bf16", kind="layer").bytes_read == 1280 + 256
    back = ops.norm_backward("n", 10, 64, dtype="bf16")
    assert back.bytes_read == 2 * 1280 + 128 + 10 * 4 and back.bytes_written == 1280 + 64 * 4


def test_rope_and_activation() -> None:
    rope = ops.rope("r", 10, 4, 8, dtype="bf16")
    assert (rope.flops, rope.bytes) == (3 * 320, 2 * 640 + 10 * 8 * 4)
    swiglu = ops.activation("a", 10, 16, dtype="bf16")
    assert (swiglu.bytes_read, swiglu.bytes_written, swiglu.flops) == (640, 320, 5 * 160)
    plain = ops.activation("a", 10, 16, dtype="bf16", function="relu", gated=False)
    assert (plain.bytes_read, plain.flops) == (320, 160)
    back = ops.activation_backward("a", 10, 16, dtype="bf16")
    assert (back.bytes_read, back.bytes_written) == (960, 640)


def test_every_activation_is_counted() -> None:
    assert set(ops.ACTIVATION_FLOPS) == set(get_args(Activation))


def test_embedding_gathers_rows_and_its_backward_touches_at_most_the_vocabulary() -> None:
    assert ops.embedding("e", 10, 64, dtype="bf16").bytes == 2 * 1280 + 80
    assert ops.embedding("e", 10, 64, dtype="bf16").flops == 0
    few, many = (ops.embedding_backward("e", tokens, 64, 50, dtype="bf16") for tokens in (10, 1000))
    assert few.bytes_written == 10 * 128 and many.bytes_written == 50 * 128


def test_linear_cross_entropy_counts_six_per_weight_and_moves_no_logits() -> None:
    tokens, hidden, vocab = 8192, 4096, 131_072
    forward = ops.linear_cross_entropy("l", tokens, hidden, vocab, dtype="bf16")
    backward = ops.linear_cross_entropy("l", tokens, hidden, vocab, dtype="bf16", backward=True)
    assert forward.flops + backward.flops == 6 * tokens * hidden * vocab
    assert forward.bytes < ops.cross_entropy("c", tokens, vocab, dtype="bf16").bytes
    again = ops.linear_cross_entropy("l", tokens, hidden, vocab, dtype="bf16", backward=True, recompute=True)
    assert again.flops == 1.5 * backward.flops
    assert backward.bytes_written == 2 * (tokens * hidden + hidden * vocab)


def test_cross_entropy_backward_overwrites_the_logits() -> None:
    forward, backward = (
        ops.cross_entropy("c", 10, 100, dtype="fp32"),
        ops.cross_entropy_backward("c", 10, 100, dtype="fp32"),
    )
    assert forward.bytes_read == 4000 + 80 and backward.bytes_written == 4000


def test_adamw_bytes_a_weight() -> None:
    assert ops.adamw("o", 1000).bytes == 28_000
    assert ops.adamw("o", 1000, weight_dtype="bf16").bytes == 30_000
    assert ops.adamw("o", 1000, weight_dtype="bf16", grad_dtype="bf16").bytes == 28_000
    assert ops.sgd("o", 1000).bytes == 20_000 and ops.sgd("o", 1000, momentum=False).bytes == 12_000


def test_experts_send_rows_out_and_back() -> None:
    send, gather = ops.dispatch("d", 10, 64, 2, dtype="bf16"), ops.combine("c", 10, 64, 2, dtype="bf16")
    assert send.bytes_written == 2 * 10 * 64 * 2 and gather.bytes_written == 10 * 64 * 2
    assert gather.flops == 2 * 2 * 10 * 64
    wire = ops.collective("a", "all_to_all", 10 * 2 * 64, 4, dtype="bf16")
    assert wire.bytes_read == 10 * 2 * 64 * 2 * 3 / 4
    assert ops.router("r", 10, 8, 2).bytes_written == 10 * 2 * 12


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_collectives_move_their_share(kind: ops.Collective, factor: float) -> None:
    op = ops.collective("c", kind, 1000, 4, dtype="fp32")
    assert op.bytes_read == op.bytes_written == 4000 * factor
    assert ops.collective("c", kind, 1000, 1, dtype="fp32").bytes == 0


def test_sampling_reads_the_logits_once() -> None:
    assert ops.sampling("s", 2, 1000).bytes == 8000 + 16
