"""A contiguous KV cache: the attention of plain generation, the slow twin of the engine's paged blocks."""

import torch
from torch import Tensor

from armillary.errors import BadInput
from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.delta.gated_delta import DeltaHeads, DeltaState, gated_delta
from armillary.kernels.simplicial.simplicial import reference as simplicial
from armillary.model.layers.attention_forms import Attend, OverLatents, Recur, WithState, masked
from armillary.spec.model import ModelConfig

# B batch, T queries, S keys, K KV heads, D head dim


class ContiguousCache:
    """Keys and values (or latents) of `batch` sequences of up to `length` tokens, one tensor for all layers.

    Rows may be at different positions: a key is visible from its own position on, so keys beyond a row's position
    (padding of a shorter prompt) are never seen before they are overwritten.
    """

    def __init__(
        self, config: ModelConfig, *, batch: int, length: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        mla, outer = config.mla, (config.num_layers, batch, length)
        in_pairs = any(kind.attention == "2-simplicial" for kind in config.layers)
        shape = (
            (*outer, (1 + in_pairs) * config.kv_heads, config.head_dim)
            if mla is None
            else (*outer, 1, mla.kv_rank + mla.rope_dim)
        )
        self.length, self.rank = length, None if mla is None else mla.kv_rank
        self.keys_LBSKD = torch.zeros(shape, dtype=dtype, device=device)
        self.states: dict[int, DeltaState] = {}
        """of gated delta-net layers: all rows continue them together"""
        self.has_states = config.num_recurrent_layers > 0
        self.values_LBSKD = torch.zeros(shape if mla is None else (), dtype=dtype, device=device)

    def at(self, positions_BT: Tensor, upto: int) -> Attend:
        """The `attend` of one step: `positions_BT` of its tokens, all below `upto`."""
        if upto > self.length:
            raise BadInput(f"{upto} tokens do not fit a cache of {self.length}; ask for fewer tokens")
        rows_B1 = torch.arange(positions_BT.shape[0], device=positions_BT.device)[:, None]
        index_1S = torch.arange(upto, device=positions_BT.device)[None]

        def attend(layer: int, q_BTND: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, options: AttentionOptions) -> Tensor:
            heads = k_BTKD.shape[2]
            keys, values = self.keys_LBSKD[layer, :, :, :heads], self.values_LBSKD[layer, :, :, :heads]
            keys[rows_B1, positions_BT] = k_BTKD.to(keys.dtype)
            values[rows_B1, positions_BT] = v_BTKD.to(values.dtype)
            seen_keys, seen_values = keys[:, :upto].to(q_BTND.dtype), values[:, :upto].to(q_BTND.dtype)
            if options.pair_windows[0]:
                lasts = (positions_BT[:, -1] + 1).tolist()
                rows = [
                    simplicial(q_BTND[[b]], seen_keys[[b], :last], seen_values[[b], :last], options)
                    for b, last in enumerate(lasts)
                ]
                return torch.cat(rows)
            return masked(q_BTND, seen_keys, seen_values, options, positions_BT, index_1S, None)

        def latent(layer: int, q_BTNL: Tensor, k_BT1L: Tensor, v_BT1C: Tensor, options: AttentionOptions) -> Tensor:
            keys = self.keys_LBSKD[layer]
            keys[rows_B1, positions_BT] = k_BT1L.to(keys.dtype)
            seen = keys[:, :upto].to(q_BTNL.dtype)
            return masked(q_BTNL, seen, seen[..., : self.rank], options, positions_BT, index_1S, None)

        if self.has_states:
            return WithState(attend, self._recur(begins=bool((positions_BT[:, 0] == 0).all())))
        return attend if self.rank is None else OverLatents(latent)

    def _recur(self, *, begins: bool) -> Recur:
        def recur(
            layer: int, qkv_BTC: Tensor, decay_BTV: Tensor, beta_BTV: Tensor, conv_CW: Tensor, heads: DeltaHeads
        ) -> Tensor:
            state = None if begins else self.states[layer]
            out, self.states[layer] = gated_delta(qkv_BTC, decay_BTV, beta_BTV, conv_CW, heads, state=state)
            return out

        return recur
