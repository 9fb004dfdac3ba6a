"""The chunked form gives the outputs, states and gradients of the definition, whatever divides a sequence."""

import pytest
import torch
from torch import Tensor

from armillary.kernels.delta.gated_delta import DeltaHeads, causal_conv, chunked, first_tokens, gated_delta, recurrent

HEADS = DeltaHeads(key_dim=6, value_dim=4, values=2)
TOKENS = 21


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def heads(tokens: int = TOKENS) -> list[Tensor]:
    """q, k, v, decay, β and a state of 2 sequences with 3 key heads."""
    torch.manual_seed(0)
    q, k = (torch.nn.functional.normalize(drawn(2, tokens, 3, 6), dim=-1) for _ in range(2))
    decay, beta = -drawn(2, tokens, 6).exp(), drawn(2, tokens, 6).sigmoid()
    return [q, k, drawn(2, tokens, 6, 4), decay, beta, drawn(2, 6, 6, 4)]


def layer(tokens: int = TOKENS) -> list[Tensor]:
    """The same before the convolution: qkv, decay, β and weights."""
    torch.manual_seed(1)
    channels = 3 * HEADS.channels
    decay, beta = -drawn(2, tokens, 6).exp(), drawn(2, tokens, 6).sigmoid()
    return [drawn(2, tokens, channels), decay, beta, drawn(channels, 4)]


@pytest.mark.parametrize("begins", [None, [0, 3, 4, 9, 16]])
@pytest.mark.parametrize("chunk", [4, 8, 64])
def test_chunks_agree_with_the_definition_forward_and_backward(chunk: int, begins: list[int] | None) -> None:
    args = [x.requires_grad_() for x in heads()]
    marks = None
    if begins is not None:
        marks = torch.zeros(2, TOKENS, dtype=torch.bool)
        marks[0, begins] = True
    wanted, found = recurrent(*args, marks), chunked(*args, marks, chunk=chunk)
    gradients = []
    for out, state in (wanted, found):
        loss = (out * torch.arange(out.numel()).view_as(out)).sum() + state.square().sum()
        gradients.append(torch.autograd.grad(loss, args))
    for a, b in zip([*found, *gradients[1]], [*wanted, *gradients[0]], strict=True):
        assert (a - b).norm() <= 1e-10 * b.norm()


def test_a_document_is_computed_as_if_it_were_alone() -> None:
    qkv, decay, beta, conv = layer()
    documents = torch.zeros(2, TOKENS, dtype=torch.long)
    documents[:, 7:] = 1
    documents[:, 9:] = 2
    together, left = gated_delta(qkv, decay, beta, conv, HEADS, documents_BT=documents, chunk=8)
    assert first_tokens(documents)[0].nonzero().flatten().tolist() == [7, 9]
    for begin, end in ((0, 7), (7, 9), (9, TOKENS)):
        part = slice(begin, end)
        alone, state = gated_delta(qkv[:, part], decay[:, part], beta[:, part], conv, HEADS)
        torch.testing.assert_close(together[:, part], alone)
    torch.testing.assert_close(left.matrix_BVDE, state.matrix_BVDE)


@pytest.mark.parametrize("parts", [(21,), (5, 16), (1, 1, 19), (1,) * 21])
def test_a_sequence_in_parts_continues_from_its_state(parts: tuple[int, ...]) -> None:
    qkv, decay, beta, conv = layer()
    wanted, last = gated_delta(qkv, decay, beta, conv, HEADS)
    state, outs = None, []
    for pieces in zip(*(x.split(parts, dim=1) for x in (qkv, decay, beta)), strict=True):
        out, state = gated_delta(*pieces, conv, HEADS, state=state)
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs, dim=1), wanted)
    assert state is not None
    torch.testing.assert_close(state.matrix_BVDE, last.matrix_BVDE)
    torch.testing.assert_close(state.inputs_BSC, qkv[:, -3:])


def test_the_convolution_is_torchs() -> None:
    qkv, _, _, conv = layer()
    padded = torch.nn.functional.pad(qkv.transpose(1, 2), (3, 0))
    wanted = torch.nn.functional.conv1d(padded, conv[:, None], groups=len(conv)).transpose(1, 2)
    torch.testing.assert_close(causal_conv(qkv, conv)[0], torch.nn.functional.silu(wanted))
