"""Recurrent states of gated delta-net layers: a cache of its own beside the paged KV blocks.

A running sequence has the slot of its row of the batch, in buffers that never move, so that CUDA graphs can be captured
over them. A slot holds the state after the sequence's last computed token: chunks of a prompt continue from it, a
preempted sequence is computed again from its first token, and a new one does not read what its slot held.
"""

import torch
from torch import Tensor

from armillary.kernels.delta.delta_rows import RowStates
from armillary.spec.model import ModelConfig

# L gated delta-net layers, R rows and the null row, S inputs that the convolution keeps, C channels, V value heads,
# D key dim, E value dim


class RecurrentStates:
    """The states of every row, of this rank's heads."""

    def __init__(
        self, config: ModelConfig, *, rows: int, dtype: torch.dtype, device: torch.device, ranks: int = 1
    ) -> None:
        delta = config.gated_delta
        assert delta is not None
        layers, heads = config.num_recurrent_layers, delta.value_heads // ranks
        wide = torch.promote_types(dtype, torch.float32)
        self.inputs_LRSC = torch.zeros(
            layers, rows, delta.conv - 1, delta.channels // ranks, dtype=dtype, device=device
        )
        self.matrices_LRVDE = torch.zeros(
            layers, rows, heads, delta.key_dim, delta.value_dim, dtype=wide, device=device
        )

    def of_layer(self, slot: int) -> RowStates:
        return RowStates(self.inputs_LRSC[slot], self.matrices_LRVDE[slot])

    @property
    def nbytes(self) -> int:
        return self.inputs_LRSC.nbytes + self.matrices_LRVDE.nbytes


def make_states(config: ModelConfig, *, max_running: int, weight: Tensor, ranks: int = 1) -> RecurrentStates | None:
    """For every row and the null row; None where the model has no such layers."""
    if not config.num_recurrent_layers:
        return None
    return RecurrentStates(config, rows=max_running + 1, dtype=weight.dtype, device=weight.device, ranks=ranks)
