"""FLOPs per token by the MFU and HFU conventions.

MFU counts what the model needs: 6 per weight of a GEMM (4 if frozen) and attention with causal as half, no
recompute (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B). HFU counts what the chip executes.
"""

from collections import Counter
from functools import lru_cache

from armillary.spec.arithmetic.attention_ops import attention, attention_backward, simplicial_attention
from armillary.spec.arithmetic.delta_ops import delta_rule
from armillary.spec.arithmetic.ops import Op
from armillary.spec.arithmetic.params import parameters
from armillary.spec.arithmetic.sublayers import attention_shape
from armillary.spec.layout import Recompute
from armillary.spec.model import LayerKind, ModelConfig


def model_flops_per_token(config: ModelConfig, sequence: int, *, frozen: int = 0, adapters: int = 0) -> float:
    """6·N + attention: N the weights of the GEMMs of a token (router, shared and top-k experts only; the output
    projection counts, tied or not, the embedding lookup does not). `frozen` of the N count 4: forward and dX but no dW;
    `adapters` are weights trained beside them (LoRA). Attention is 6·layers·sequence·heads·head_dim, causal as half."""
    multiplied = parameters(config).multiplied
    assert 0 <= frozen <= multiplied, "cannot freeze more weights than a token uses"
    return 6 * (multiplied - frozen) + 4 * frozen + 6 * adapters + 3 * attention_flops_per_token(config, sequence)


def attention_flops_per_token(config: ModelConfig, sequence: int) -> float:
    """Forward attention of one token, averaged over a sequence: Σ over layers of 2·heads·(qk_dim + v_dim)·keys, where
    the mean number of keys is sequence/2, or what the window or chunk leaves of it."""
    return _over_layers(config, sequence, backward=False)


@lru_cache(maxsize=256)
def _over_layers(config: ModelConfig, sequence: int, *, backward: bool) -> float:
    counts = Counter(config.layers).items()
    return sum(count * _attention(config, kind, sequence, backward=backward).flops for kind, count in counts) / sequence


def _attention(config: ModelConfig, kind: LayerKind, sequence: int, *, backward: bool) -> Op:
    if kind.attention == "gated_delta":
        assert config.gated_delta is not None
        return delta_rule("", config.gated_delta, tokens=sequence, sequences=1, dtype="bf16", backward=backward)
    shape, spans = attention_shape(config, kind), [(sequence, sequence)]
    if kind.attention != "2-simplicial":
        return (attention_backward if backward else attention)("", shape, spans, dtype="bf16", half=True)
    assert config.simplicial is not None
    windows = {"window_1": config.simplicial.window_1, "window_2": config.simplicial.window_2}
    return simplicial_attention("", shape, spans, **windows, dtype="bf16", backward=backward)


def hardware_flops_per_token(
    config: ModelConfig,
    sequence: int,
    *,
    recompute: Recompute = "none",
    recompute_every: int = 1,
    flash: bool = True,
    frozen: int = 0,
    adapters: int = 0,
) -> float:
    """Model FLOPs plus recompute: flash attention's backward recomputes the scores (5 GEMMs where the model needs 4);
    `full` recomputes the forward of one layer in `recompute_every`; `selective` stores the outputs of GEMMs and
    attention, so that it repeats none of their FLOPs."""
    forward_attention = attention_flops_per_token(config, sequence)
    recomputed = _over_layers(config, sequence, backward=True) - 2 * forward_attention if flash else 0.0
    if recompute == "full":
        layers = parameters(config).multiplied - config.vocab * config.hidden
        recomputed += (2 * (layers + adapters) + forward_attention) / recompute_every
    return model_flops_per_token(config, sequence, frozen=frozen, adapters=adapters) + recomputed
