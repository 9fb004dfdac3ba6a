"""The reference definition of the transformer: dense and mixture-of-experts decoders, complete or as one pipeline
stage.

`model(tokens_BT, positions_BT, attend) -> hidden_BTH`; later stages take hidden states instead of tokens;
`model.head(hidden)` is separate, for chunked losses and last-token logits. The module knows nothing of caches, packing
or parallelism.

Two faster wirings of the same layers are tested against `Block.forward`: `model/fused` (training; tests/model/fused)
and `engine/runner/forward.py` (serving; tests/engine/runner/test_reference_executor.py, test_families.py and
test_executor.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.model.device import refuse_too_big
from armillary.model.fused import dispatch as fused_block
from armillary.model.fused.passes import FusedOptions
from armillary.model.layers.attention import Attention
from armillary.model.layers.attention_forms import Attend
from armillary.model.layers.gated_delta_net import GatedDeltaNet, fill_fresh
from armillary.model.layers.latent_attention import LatentAttention
from armillary.model.layers.mlp import MLP
from armillary.model.layers.norm import Norm, hidden_norm
from armillary.model.layers.rope import CosSin, RotaryTable
from armillary.model.layers.simplicial_attention import SimplicialAttention
from armillary.model.moe.experts import MixtureOfExperts, Router
from armillary.model.quantized.packed_linear import PackedEmbedding
from armillary.model.random_values import PartOf, all_of, fill_normal
from armillary.model.supported_shapes import refuse_unbuildable
from armillary.spec.model import LayerKind, ModelConfig

# B batch, T tokens, H hidden, V vocabulary
Progress = Callable[[int, int], None]


class Block(nn.Module):
    """One layer: attention and an MLP (or experts), each with its norms and residual."""

    def __init__(self, config: ModelConfig, kind: LayerKind) -> None:
        super().__init__()
        self.parallel, self.residual_scale = config.parallel != "none", config.residual_scale
        before, after = config.norm_at in ("before", "both"), config.norm_at in ("after", "both")
        self.attention = _mixer(config, kind)
        self.mlp = _mlp(config, kind)
        self.attention_norm = hidden_norm(config) if before else None
        self.attention_post_norm = hidden_norm(config) if after else None
        self.mlp_norm = hidden_norm(config) if before and config.parallel != "one_norm" else None
        self.mlp_post_norm = hidden_norm(config) if after else None
        self.fused: FusedOptions | None = None

    def forward(self, x_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int) -> Tensor:
        """`layer` is an argument, not an attribute, so that compiled blocks of one kind share one graph."""
        if self.fused is not None and cos_sin is not None and fused_block.fits(self):
            return fused_block.run(self, x_BTH, cos_sin, attend, layer, self.fused)
        normed_BTH = _maybe(self.attention_norm, x_BTH)
        mixed_BTH = _maybe(self.attention_post_norm, self.attention(normed_BTH, cos_sin, attend, layer))
        if self.parallel:
            mlp_in = normed_BTH if self.mlp_norm is None else self.mlp_norm(x_BTH)
            return torch.add(x_BTH, mixed_BTH + self.mlp(mlp_in), alpha=self.residual_scale)
        if self.mlp_norm is not None and self.residual_scale == 1.0:
            normed_BTH, x_BTH = self.mlp_norm.add(mixed_BTH, x_BTH)
        else:
            x_BTH = torch.add(x_BTH, mixed_BTH, alpha=self.residual_scale)
            normed_BTH = _maybe(self.mlp_norm, x_BTH)
        added_BTH = _maybe(self.mlp_post_norm, self.mlp(normed_BTH))
        return torch.add(x_BTH, added_BTH, alpha=self.residual_scale)


class Transformer(nn.Module):
    """A decoder, or the pipeline stage that holds `layers` and, at the ends, the embedding and the head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: range | None = None,
        first: bool = True,
        last: bool = True,
        rope_length: int | None = None,
    ) -> None:
        """`rope_length` fixes the sequence length for rotary scaling rules that depend on it (dynamic, longrope)."""
        super().__init__()
        refuse_unbuildable(config)
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden) if first else None
        learned = first and config.positions == "learned"
        self.position_embedding = nn.Embedding(config.learned_positions, config.hidden) if learned else None
        self.rotary = RotaryTable(config, fixed_length=rope_length) if config.positions == "rope" else None
        span = range(config.num_layers) if layers is None else layers
        self.blocks = nn.ModuleDict({str(i): Block(config, config.layers[i]) for i in span})
        self.norm = hidden_norm(config) if last and config.final_norm else None
        self.residual_dtype: torch.dtype | None = None
        own_head = last and not (config.tied and first)
        self.output = nn.Linear(config.hidden, config.vocab, bias=config.head_bias) if own_head else None

    def forward(self, x: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        """Token ids [B, T] (or hidden [B, T, H] on a later stage) to hidden [B, T, H], normalised on the last stage."""
        x_BTH = self.embed(x, positions_BT) if self.embedding is not None else x
        if self.residual_dtype is not None:
            x_BTH = x_BTH.to(self.residual_dtype)
        cos_sin = self.rotary(positions_BT) if self.rotary is not None else None
        for name, block in self.blocks.items():
            x_BTH = block(x_BTH, cos_sin, attend, int(name))
        return _maybe(self.norm, x_BTH)

    def embed(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        assert self.embedding is not None
        x_BTH = self.embedding(tokens_BT)
        if self.config.embedding_scale != 1.0:
            x_BTH = x_BTH * _rounded(self.config.embedding_scale, x_BTH.dtype)
        return x_BTH if self.position_embedding is None else x_BTH + self.position_embedding(positions_BT)

    def head(self, hidden_BTH: Tensor) -> Tensor:
        """Hidden to logits [..., V]."""
        if isinstance(self.embedding, PackedEmbedding) and self.output is None:
            return self.scaled_logits(self.embedding.linear(hidden_BTH))
        return self.scaled_logits(
            F.linear(hidden_BTH, *self.head_weights()) if self.output is None else self.output(hidden_BTH)
        )

    def head_weights(self) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) of the head: the output projection, or the tied embedding."""
        if self.output is not None:
            return self.output.weight, self.output.bias
        assert self.embedding is not None, "a stage without embedding or output has no head"
        return self.embedding.weight, None

    def scaled_logits(self, logits: Tensor) -> Tensor:
        """With the model's logit scale and soft cap."""
        scale, cap = self.config.logit_scale, self.config.logit_softcap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @torch.no_grad()
    def initialize(
        self, *, seed: int, std: float = 0.02, progress: Progress | None = None, part_of: PartOf = all_of
    ) -> None:
        """Random weights: normal(std), projections back into the residual stream divided by sqrt(2·layers).

        A value depends on the seed, the tensor's name and its position in the full tensor only: stages and shards
        (`part_of` gives this process's) draw the same weights as the complete model.
        """
        into_residual = std / (2 * self.config.num_layers) ** 0.5
        for module in self.modules():
            if isinstance(module, Norm):
                module.reset()
        parameters = list(self.named_parameters())
        for done, (name, parameter) in enumerate(parameters, start=1):
            if progress:
                progress(done, len(parameters))
            if name.rsplit(".", 2)[-2].endswith("norm"):
                continue
            if name.endswith(("bias", "bias_E2F", "bias_EH", "sinks_N")):
                parameter.zero_()
                continue
            if name.endswith(("conv_CW", "rate_V", "rate_bias_V")):
                fill_fresh(part_of(parameter), seed=seed, name=name)
                continue
            if name == "output.weight" and self.config.tied:
                name = "embedding.weight"  # a last stage without the embedding holds a copy
            width = into_residual if name.endswith(("out.weight", "down.weight", "down_EHF")) else std
            fill_normal(part_of(parameter), seed=seed, name=name, std=width)


def build(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int | None = None,
    rope_length: int | None = None,
    progress: Progress | None = None,
) -> Transformer:
    """A model on `device`, built on meta first; with random weights where a seed is given, else uninitialised."""
    with torch.device("meta"):
        model = Transformer(config, rope_length=rope_length)
    size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    refuse_too_big(config.name, size, torch.device(device))
    model = model.to(dtype).to_empty(device=device)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()
    if seed is not None:
        model.initialize(seed=seed, progress=progress)
    return model


def _rounded(value: float, dtype: torch.dtype) -> float:
    """`value` rounded to the dtype: Gemma was trained with a rounded scale."""
    return torch.tensor(value, dtype=dtype, device="cpu").item()


def _mixer(config: ModelConfig, kind: LayerKind) -> Attention | LatentAttention | GatedDeltaNet | SimplicialAttention:
    """What mixes the tokens of a sequence."""
    if kind.attention == "2-simplicial":
        return SimplicialAttention(config, kind)
    if kind.attention == "gated_delta":
        return GatedDeltaNet(config)
    return Attention(config, kind) if config.mla is None else LatentAttention(config)


def _mlp(config: ModelConfig, kind: LayerKind) -> nn.Module:
    if kind.mlp == "moe":
        return MixtureOfExperts(config)
    return MLP(config.hidden, config.ffn, activation=config.activation, gated=config.gated, bias=config.mlp_bias)


def _maybe(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)
