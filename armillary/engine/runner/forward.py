"""Forward pass of the engine over paged KV blocks, from tokens to logits, in few launches.

A layer is nine calls (norm with residual add, fused QKV, keys and values into the cache, attention, out, norm, up,
activation, down), or six for a few tokens, where norms, gate and residual are fused into the GEMMs; experts are three
kernels then. Nothing here waits for the device, so that a step can be captured in a CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from armillary.engine.cache.layer_groups import Group, state_places
from armillary.engine.runner.adapter_slots import AdapterSlots
from armillary.engine.runner.device_state import DeviceRows, with_heads
from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.latent_layer import attend_latents
from armillary.engine.runner.layer import Layer, full_qk_norm, make_layer, without_gates
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn, linear_fn, run_fused
from armillary.engine.runner.mixture_layer import run_mixture, run_small_mixture
from armillary.engine.runner.ranks.stage_transfer import Pipeline
from armillary.engine.runner.ranks.token_gather import GatheredTokens, run_without_tokens
from armillary.engine.runner.rotary_tables import angle_tables, query_factors
from armillary.engine.runner.step_input import Inputs, Shape, gathered, inputs_of
from armillary.kernels.delta.delta_rows import RowBatch
from armillary.kernels.gemm.skinny import MAX_TOKENS
from armillary.kernels.latent.latent_forms import LatentBatch, latent_batch, most_absorbed
from armillary.kernels.moe.expert_load import ExpertLoad
from armillary.kernels.paged.paged_attention import PagedBatch
from armillary.kernels.paged.qkv_to_cache import can_attend
from armillary.kernels.simplicial.paged import write_pairs
from armillary.model.layers.norm import Norm
from armillary.model.moe.sorted_dispatch import SortedDispatch
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.transformer import Transformer
from armillary.spec.model import MLA

# T tokens, B sequences, H hidden, V vocabulary, G groups of layers, R rotated dims / 2

Reduce = Callable[[Tensor], Tensor]


def no_reduce(x: Tensor) -> Tensor:
    """The all-reduce of a single rank."""
    return x


class LayerInputs(NamedTuple):
    """What a layer's attention is given beside the projection."""

    batch: PagedBatch | LatentBatch
    slots_T: Tensor  # where keys and values are written
    cos_TR: Tensor | None  # none: nothing is rotated
    sin_TR: Tensor | None
    q_scale_T: Tensor | None  # factor of queries
    row_batch: RowBatch | None  # which rows' states a gated delta-net layer continues
    load: ExpertLoad | None  # where the layer's choices of experts are counted
    drafts: bool  # rows may read keys that other rows of the step write


class Forward:
    """Layers, rotary tables and the head."""

    def __init__(
        self,
        model: Transformer,
        rows: DeviceRows,
        groups: tuple[Group, ...],
        kernels: EngineKernels,
        *,
        max_model_len: int,
    ) -> None:
        place = layer_places(groups, model) | state_places(model.config)
        assert {int(name) for name in model.blocks} <= set(place), "the cache was planned for another model"
        self.model, self.rows, self.kernels = model, rows, kernels
        self.layers = [make_layer(block, *place[int(name)], int(name)) for name, block in model.blocks.items()]  # type: ignore[arg-type]
        for layer in self.layers:
            if layer.mixture is not None and kernels.grouped is not None:
                layer.mixture.dispatch = SortedDispatch(kernels.grouped)
        self.head_dim, self.query_group = model.config.head_dim, model.config.heads // model.config.kv_heads
        self.most_absorbed = None if model.config.mla is None else _most_absorbed(model.config.mla, kernels)
        """queries of a sequence up to which latent attention is absorbed; None: the model has none"""
        self.angles = None if model.rotary is None else angle_tables(model.rotary, max_model_len)
        self.q_factors = None if model.rotary is None else query_factors(model.rotary, max_model_len)
        moe, num_mixtures = model.config.moe, sum(layer.mixture is not None for layer in self.layers)
        counts_shape = num_mixtures, moe.num_experts if moe is not None else 0
        self.expert_counts_LE = torch.zeros(counts_shape, dtype=torch.int64, device=rows.device)
        """how often each expert of each layer that has some was chosen for a token; padding is not counted"""
        self._expert_counts = self.expert_counts_LE.unbind()
        self.adapters: AdapterSlots | None = None  # LoRA adapters, where the engine takes some
        self.reduce: Reduce = no_reduce  # all-reduce of partial GEMM results
        self.pipeline: Pipeline | None = None  # the other stages, where this model is one of several
        self.gathered_tokens: GatheredTokens | None = None  # of all dp ranks, where attention is data parallel
        self.entry: Callable[[Inputs, Tensor], Tensor] | None = None  # what makes the first layer's input of embeddings
        self.keep: Callable[[Inputs, Tensor], None] | None = None
        """gets the hidden states of all tokens of a step, before the last norm: a draft head's input"""
        self.into_cache = full_qk_norm(kernels.qkv_cache, model.config) if kernels.norms_apart else kernels.qkv_cache
        self.head: LinearFn = model.head
        self.most_fused = _most_fused(self.layers, kernels)
        self.one_head = _plain_head(model) if kernels.small is not None and model.norm is not None else None
        """the head's weight, where norm and logits of a single token can be one fused GEMM"""

    def last(self, inputs: Inputs) -> Tensor:
        """[B, H]: the last token of each sequence, before the last norm. Where most tokens are others, the last layer
        drops them after its attention."""
        shape = inputs.shape
        if shape.decodes:
            return self.hidden(inputs)
        if shape.rows < shape.tokens and self.keep is None and self.gathered_tokens is None:
            return self.hidden(inputs, inputs.long("lasts_B"))
        return gathered(inputs, self.hidden(inputs))

    def hidden(self, inputs: Inputs, wanted: Tensor | None = None) -> Tensor:
        """[T, H], before the last norm; only of the `wanted` tokens where given."""
        shape, (tokens_T, tables_GBP, cos_sin) = inputs.shape, self._gathered(inputs)
        x = self._into_stage(inputs, tokens_T)
        if self.gathered_tokens is not None:
            self.gathered_tokens.num_live = inputs.narrow("starts")[-1:]
        batches = [self._batch(inputs, tables_BP, len(x)) for tables_BP in tables_GBP]
        slots_GT = inputs.long("slots_GT").view(shape.groups, -1)
        row_batch = None if self.rows.states is None else _row_batch(inputs)
        small = self.kernels.small is not None and len(x) <= self.most_fused and not shape.adapters
        if self.adapters is not None:
            self.adapters.use(self.rows.adapters_R[inputs.long("rows_T")] if shape.adapters else None)
        added: Tensor | None = None
        q_scale_T = None if self.q_factors is None else self.q_factors[inputs.long("positions_T")]
        counts = iter(self._expert_counts)
        for layer in self.layers:
            selected = wanted if layer is self.layers[-1] and self.has_head else None
            cos, sin = cos_sin[layer.sliding] if layer.rotates else (None, None)
            factor = q_scale_T if layer.scales_queries else None
            load = None if layer.mixture is None else ExpertLoad(next(counts), _num_live(inputs, selected))
            context = LayerInputs(
                batches[layer.group], slots_GT[layer.group], cos, sin, factor, row_batch, load, shape.drafts
            )
            if small:
                x = self._small(layer, x, context, selected)
            else:
                x, added = self._layer(layer, x, added, context, selected)
        x = x if added is None else x + added
        if self.keep is not None:
            self.keep(inputs, x)
        return x

    def run_experts_only(self) -> None:
        """A step without tokens on this dp rank: compute its experts for the tokens of the others."""
        assert self.gathered_tokens is not None
        weight = next(self.model.parameters())
        x_0H = torch.empty(0, self.model.config.hidden, dtype=weight.dtype, device=weight.device)
        for layer in self.layers:
            if layer.mixture is not None:
                run_without_tokens(layer.mixture, x_0H)

    @property
    def has_head(self) -> bool:
        """Whether this stage is the last."""
        return self.pipeline is None or self.pipeline.is_last

    def _into_stage(self, inputs: Inputs, tokens_T: Tensor) -> Tensor:
        if self.pipeline is None or self.pipeline.is_first:
            embedded_TH = self.model.embed(tokens_T, inputs.long("positions_T"))
            return embedded_TH if self.entry is None else self.entry(inputs, embedded_TH)
        return self.pipeline.received(len(tokens_T))

    def _batch(self, inputs: Inputs, tables_BP: Tensor, num_tokens: int) -> PagedBatch | LatentBatch:
        """The sequences of a step, as attention takes them."""
        starts, lengths_B = inputs.narrow("starts"), inputs.narrow("lengths_B")
        batch = PagedBatch(tables_BP=tables_BP, starts=starts, max_query=inputs.shape.max_query, lengths_B=lengths_B)
        return batch if self.most_absorbed is None else latent_batch(batch, num_tokens, self.most_absorbed)

    def inputs(self, shape: Shape, packed: Tensor) -> Inputs:
        """A step's array on the device, with the decode inputs gathered where a kernel does so."""
        look, angles = self.kernels.look_up, self.angles
        if look is None or not shape.decodes or angles is None or angles[True] is not angles[False]:
            return inputs_of(shape, packed)
        rows, parts = self.rows, shape.parts()
        places = {name: parts[name][0] for name in ("rows_T", "positions_T", "angles_T", "rows_B")}
        gathered_inputs = look(
            packed, places, shape.rows, rows.tokens_RT, rows.tables_GRP, angles[False], rows.floats_FR, rows.ints_IR
        )
        return Inputs(shape=shape, packed=packed, wide=gathered_inputs.wide, decode_inputs=gathered_inputs)

    def _gathered(self, inputs: Inputs) -> tuple[Tensor, Tensor, dict[bool, tuple[Tensor | None, Tensor | None]]]:
        """(tokens, block tables, cos and sin)"""
        rows, gathered_inputs = self.rows, inputs.decode_inputs
        if gathered_inputs is not None:
            cos_sin = (gathered_inputs.cos_BA, gathered_inputs.sin_BA)
            return gathered_inputs.tokens_B, gathered_inputs.tables_GBP, {False: cos_sin, True: cos_sin}
        tokens_T = rows.tokens_RT[inputs.long("rows_T"), inputs.long("positions_T")]
        return tokens_T, rows.tables_GRP[:, inputs.long("rows_B")], self._cos_sin_of(inputs.long("angles_T"))

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """[B, V]"""
        norm, small = self.model.norm, self.kernels.small
        if self.one_head is not None and small is not None and len(hidden_BH) == 1 and self.head == self.model.head:
            assert norm is not None
            return small(hidden_BH, self.one_head, norm.weight, None, norm.eps)  # type: ignore[no-any-return]
        return self.head(self.normed(hidden_BH))

    def normed(self, hidden_TH: Tensor) -> Tensor:
        """[T, H], after the last norm."""
        norm = self.model.norm
        return hidden_TH if norm is None else self._norm(norm, hidden_TH)

    def _cos_sin_of(self, angles_T: Tensor) -> dict[bool, tuple[Tensor | None, Tensor | None]]:
        if self.angles is None:
            return {False: (None, None), True: (None, None)}
        full = tuple(table[angles_T] for table in self.angles[False])
        same = self.angles[True] is self.angles[False]
        local = full if same else tuple(table[angles_T] for table in self.angles[True])
        return {False: full, True: local}  # type: ignore[dict-item]

    def _layer(
        self,
        layer: Layer,
        x: Tensor,
        added: Tensor | None,
        context: LayerInputs,
        selected: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(residual stream, what is still to be added to it); after attention only of the `selected` tokens."""
        norms = layer.norms
        normed, x = self._summed(norms["attention_norm"], x, added)
        qkv = self._adapted(layer, "attention.qkv", normed, layer.qkv(normed))
        mixed = self._attention(layer, qkv, context)
        if selected is not None:
            mixed, normed, x = (each.index_select(0, selected) for each in (mixed, normed, x))
            if self.adapters is not None:
                self.adapters.select(selected)
        out = self.reduce(self._adapted(layer, "attention.out", mixed, layer.out(mixed)))
        mixed = _scaled(self._after(norms["attention_post_norm"], out), layer.scale)
        if layer.parallel:
            own = norms["mlp_norm"]
            inner = normed if own is None else self._norm(own, x)
            return x, mixed + _scaled(self._mlp(layer, inner, context.load), layer.scale)
        normed, x = self._summed(norms["mlp_norm"], x, mixed)
        return x, _scaled(self._after(norms["mlp_post_norm"], self._mlp(layer, normed, context.load)), layer.scale)

    def _attention(self, layer: Layer, qkv: Tensor, context: LayerInputs) -> Tensor:
        batch, slots_T, cos, sin, _, row_batch, _, _ = context
        if layer.delta is not None:
            assert self.rows.states is not None and row_batch is not None
            states = self.rows.states.of_layer(layer.slot)
            return self.kernels.delta_rows(qkv, layer.delta, states, row_batch)  # type: ignore[no-any-return]
        blocks = self.rows.blocks[layer.slot]
        if layer.latent is not None:
            assert isinstance(batch, LatentBatch) and cos is not None and sin is not None
            return attend_latents(layer.latent, qkv, blocks, batch, slots_T, (cos, sin), self.kernels)
        assert isinstance(batch, PagedBatch)
        if layer.simplicial is not None:
            angles = None if cos is None or sin is None else (cos[:, None], sin[:, None])
            q_TND, k_TJD, v_TJD = layer.simplicial.heads(qkv, angles, self.query_group)
            write_pairs(k_TJD, v_TJD, blocks, slots_T)
            return self.kernels.simplicial(q_TND, blocks, batch, layer.options).flatten(1)  # type: ignore[no-any-return]
        qkv, gates = without_gates(layer, qkv, self.head_dim, self.query_group)
        kv_heads = qkv.shape[1] // self.head_dim // (self.query_group + 2)
        mixed = self._attend(layer, qkv, with_heads(blocks, kv_heads), context)
        return mixed if gates is None else mixed * torch.sigmoid(gates)

    def _attend(self, layer: Layer, qkv: Tensor, blocks: Tensor, context: LayerInputs) -> Tensor:
        batch, slots_T, cos, sin, q_scale_T, _, _, drafts = context
        assert isinstance(batch, PagedBatch)
        heads = layer.heads if q_scale_T is None else replace(layer.heads, q_scale_T=q_scale_T)
        if self.kernels.tokens is not None and not drafts and can_attend(qkv, blocks, cos, heads, batch, layer.options):
            return self.kernels.tokens(qkv, blocks, slots_T, cos, sin, heads, batch, layer.options)  # type: ignore[no-any-return]
        q_TND, _ = self.into_cache(qkv, blocks, slots_T, cos, sin, heads)
        return self.kernels.attention(q_TND, blocks, batch, layer.options).flatten(1)  # type: ignore[no-any-return]

    def _mlp(self, layer: Layer, x: Tensor, load: ExpertLoad | None) -> Tensor:
        if layer.mixture is not None and self.gathered_tokens is not None:  # which counts and adds up itself
            return run_mixture(layer.mixture, x, None, self.kernels)
        if layer.mixture is not None:
            return self.reduce(run_mixture(layer.mixture, x, load, self.kernels))
        assert layer.up is not None and layer.down is not None
        up = self._adapted(layer, "mlp.up", x, layer.up(x))
        inner = self.kernels.activate(up, layer.activation, layer.gated)
        return self.reduce(self._adapted(layer, "mlp.down", inner, layer.down(inner)))

    def _adapted(self, layer: Layer, module: str, x: Tensor, y: Tensor) -> Tensor:
        """y, a projection of x, with the LoRA adapters of its rows added."""
        weights = None if self.adapters is None else self.adapters.weights(layer.number, module)
        if weights is None:
            return y
        assert self.adapters is not None and self.adapters.rows is not None
        return self.kernels.lora(y.contiguous(), x, *weights, self.adapters.rows)  # type: ignore[no-any-return]

    def _small(
        self,
        layer: Layer,
        x: Tensor,
        context: LayerInputs,
        selected: Tensor | None,
    ) -> Tensor:
        """A few tokens: norms, gate and residual are fused into the GEMMs."""
        first, second = layer.norms["attention_norm"], layer.norms["mlp_norm"]
        assert second is not None
        mixed = self._attention(layer, run_fused(layer.qkv, x, self.kernels.small, norm=first), context)
        if selected is not None:
            mixed, x = mixed.index_select(0, selected), x.index_select(0, selected)
        x = run_fused(layer.out, mixed, self.kernels.small, residual=x)
        if layer.mixture is not None:
            return run_small_mixture(layer.mixture, x, second, context.load, self.kernels)
        inner = run_fused(layer.up, x, self.kernels.small, norm=second, gated=True)
        return run_fused(layer.down, inner, self.kernels.small, residual=x)

    def _norm(self, norm: Norm, x: Tensor) -> Tensor:
        return self.kernels.norm(x, norm.weight, norm.bias, norm.eps, norm.kind, norm.plus_one)  # type: ignore[no-any-return]

    def _after(self, norm: Norm | None, x: Tensor) -> Tensor:
        return x if norm is None else self._norm(norm, x)

    def _summed(self, norm: Norm | None, x: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm of the sum, the sum)."""
        if norm is None or added is None:
            x = x if added is None else x + added
            return self._after(norm, x), x
        return self.kernels.add_norm(added, x, norm.weight, norm.bias, norm.eps, norm.kind, norm.plus_one)  # type: ignore[no-any-return]


def layer_places(groups: Sequence[Group], model: Transformer) -> dict[int, tuple[int, int]]:
    """Layer of this model, or of this stage of it -> (group, index among the group's layers here)."""
    own = [[layer for layer in group.layers if str(layer) in model.blocks] for group in groups]
    return {layer: (g, slot) for g, layers in enumerate(own) for slot, layer in enumerate(layers)}


def _row_batch(inputs: Inputs) -> RowBatch:
    """The sequences of a step, as layers with recurrent states take them."""
    starts, lengths_B = inputs.narrow("starts"), inputs.narrow("lengths_B")
    return RowBatch(inputs.narrow("rows_B"), starts, lengths_B, inputs.shape.max_query)


def _most_absorbed(mla: MLA, kernels: EngineKernels) -> int:
    """All, where steps are captured in CUDA graphs: the workspace of the expanded form depends on lengths, which only
    the device knows."""
    return 1 << 30 if kernels.capturable else most_absorbed(mla.kv_rank, mla.nope_dim, mla.v_dim)


def _num_live(inputs: Inputs, selected: Tensor | None) -> Tensor:
    """int32 [1]: tokens of a step that are no padding; of the `selected` ones, those of sequences."""
    if selected is None:
        return inputs.narrow("starts")[-1:]
    return (inputs.narrow("lengths_B") > 0).sum(dtype=torch.int32)[None]


def _plain_head(model: Transformer) -> Tensor | None:
    """The head's weight, where logits are a plain GEMM with it."""
    config, output = model.config, model.output
    if config.logit_scale != 1.0 or config.logit_softcap is not None or model.embedding is None:
        return None
    if output is None:
        return model.embedding.weight if isinstance(model.embedding, nn.Embedding) else None
    return output.weight if isinstance(output, nn.Linear) and output.bias is None else None


def _scaled(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _most_fused(layers: Sequence[Layer], kernels: EngineKernels) -> int:
    """Tokens up to which norms, gates and residuals are fused into the GEMMs; packed weights have that for one."""
    mixtures = any(layer.mixture is not None for layer in layers)
    if kernels.small is None or (mixtures and (kernels.moe is None or kernels.grouped_moe is None)):
        return 0
    linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.up, layer.down) if each is not None]
    shared = [layer.mixture.shared for layer in layers if layer.mixture is not None]
    linears += [linear_fn(each) for mlp in shared if mlp is not None for each in (mlp.up, mlp.down)]
    packed = [linear for linear in linears if not isinstance(linear, Dense)]
    if not packed:
        return MAX_TOKENS
    return int(all(isinstance(linear, PackedLinear) and linear.can_fuse for linear in packed))
