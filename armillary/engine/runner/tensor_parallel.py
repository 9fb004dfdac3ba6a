"""Tensor parallelism of the engine: heads, MLPs and the vocabulary are sharded; rank 0 schedules and broadcasts steps.

Rank 0 sends each step as bytes (`step_channel`); the others run the same steps until there are no more. Where there are
more ranks than KV heads, several hold the same one. Every rank samples the tokens itself, from the same logits by the
same seeds, so that the next step finds them on its own device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.engine.runner.engine_kernels import EngineKernels
from armillary.engine.runner.executor import FastExecutor, Launched
from armillary.engine.runner.expert_counters import ExpertCounters
from armillary.engine.runner.latent_layer import LatentLayer
from armillary.engine.runner.layer import Layer, free_weights, full_qk_norm, linears_of
from armillary.engine.runner.linear.linear_fn import Dense, LinearFn
from armillary.engine.runner.rank_layout import Experts
from armillary.engine.runner.sharded_weights import is_sharded, qkv_rows
from armillary.engine.runner.step_bytes import RankMessage
from armillary.engine.runner.step_channel import RankGone, StepReceiver, StepSender
from armillary.engine.scheduler.decision import Decision
from armillary.kernels.delta.delta_rows import DeltaWeights
from armillary.model.moe.experts import Dispatch, MixtureOfExperts, Overlapped, plain_dispatch
from armillary.model.moe.experts import Experts as AllExperts
from armillary.model.moe.packed_experts import PackedExperts
from armillary.model.moe.sorted_dispatch import SortedDispatch
from armillary.model.quantized.packed_linear import PackedEmbedding, PackedLinear
from armillary.model.weights.adapter_folder import Adapter, read_adapter
from armillary.parallel.collectives import Group, all_gather
from armillary.parallel.loading.read_plan import Span
from armillary.parallel.shared_sum import sum_over
from armillary.spec.model import ModelConfig

# N query heads, K KV heads, D head dim, H hidden


def local_kv_heads(config: ModelConfig, size: int) -> int:
    """KV heads per rank; 1 where there are more ranks."""
    return max(1, config.kv_heads // size)


def shard(executor: FastExecutor, config: ModelConfig, group: Group, experts: Experts | None = None) -> None:
    """Leave this rank its shard of every GEMM: the weights are cut, or were loaded as shards (`load_shard`)."""
    experts = experts or Experts(tp=group.size, tp_rank=group.rank)
    forward, loaded = executor.forward, is_sharded(executor.forward.model)
    for layer in forward.layers:
        if not loaded:
            _shard_weights(layer, config, group, experts)
        _shard_rest(layer, config, group)
        if layer.mixture is not None:
            divide_experts(layer.mixture, experts, forward.kernels)
    if experts.parts > 1:  # these choose experts themselves, and have them all
        forward.kernels = replace(forward.kernels, moe=None, grouped_moe=None)
    forward.query_group = config.heads // group.size // local_kv_heads(config, group.size)
    forward.reduce = sum_over(group, executor.device)
    if config.qk_norm == "all":
        forward.into_cache = full_qk_norm(
            forward.kernels.qkv_cache,
            config,
            rank=group.rank,
            size=group.size,
            add=forward.reduce,
        )
    if forward.kernels.small is not None:
        forward.kernels = replace(forward.kernels, small=None)  # every rank would add its residual
    if forward.has_head:
        forward.head = _shard_head(forward.head, forward.model.config.vocab, group, loaded=loaded)
    for block in forward.model.blocks.values():
        free_weights(*linears_of(block))


def _shard_weights(layer: Layer, config: ModelConfig, group: Group, experts: Experts) -> None:
    size, rank = group.size, group.rank
    local = config.heads // size * (config.head_dim if config.mla is None else config.mla.v_dim)
    if layer.delta is not None:
        local = _shard_delta(layer, layer.delta, group)
    elif layer.latent is not None:
        _shard_latent(layer, layer.latent, group)
    else:
        spans = qkv_rows(config, group, in_pairs=layer.simplicial is not None)
        layer.qkv = _cut(_plain(layer.qkv), spans)
    layer.out = _columns(_plain(layer.out), slice(rank * local, (rank + 1) * local))
    if layer.up is not None and layer.down is not None:
        up, down = _plain(layer.up), _plain(layer.down)
        inner, rows = down.weight.shape[1] // size, len(up.weight) // size
        layer.up = _rows(up, slice(rank * rows, (rank + 1) * rows))
        layer.down = _columns(down, slice(rank * inner, (rank + 1) * inner))
    else:
        assert isinstance(layer.mixture, MixtureOfExperts)
        _shard_mixture(layer.mixture, group, experts)


def _shard_rest(layer: Layer, config: ModelConfig, group: Group) -> None:
    """What belongs to heads; and biases of sums over ranks, which the first rank adds."""
    local = config.heads // group.size
    local_heads = slice(group.rank * local, (group.rank + 1) * local)
    sinks, slopes = layer.options.sinks_N, layer.options.slopes_N
    layer.options = replace(
        layer.options,
        sinks_N=None if sinks is None else sinks[local_heads].contiguous(),
        slopes_N=None if slopes is None else slopes[local_heads].contiguous(),
    )
    for summed in (layer.out, layer.down) if group.rank else ():
        if summed is not None:
            assert isinstance(summed, Dense | PackedLinear)
            summed.bias = None


def _drop_bias(experts: AllExperts | PackedExperts) -> None:
    if isinstance(experts, PackedExperts):
        for linear in experts.down:
            linear.bias = None
    elif experts.down_bias_EH is not None:
        experts.down_bias_EH.data.zero_()


def _cut(qkv: Dense, spans: Sequence[Span]) -> Dense:
    """These rows."""
    weight, bias = (None if x is None else torch.cat([x[a:b] for a, b in spans]) for x in (qkv.weight, qkv.bias))
    assert weight is not None
    return Dense(weight, bias)


def _shard_delta(layer: Layer, delta: DeltaWeights, group: Group) -> int:
    """Full key heads with their value heads; returns the inputs that the output projection has left."""

    def own(rows: Tensor) -> Tensor:
        return rows.chunk(group.size)[group.rank].contiguous()

    layer.qkv = Dense(own(_plain(layer.qkv).weight))
    layer.delta = delta._replace(
        conv_CW=own(delta.conv_CW), log_rate_V=own(delta.log_rate_V), rate_bias_V=own(delta.rate_bias_V)
    )
    return len(layer.delta.log_rate_V) * delta.heads.value_dim


def _shard_latent(layer: Layer, latent: LatentLayer, group: Group) -> None:
    """Queries and up-projections by heads; latents and their norms are replicated."""
    local = len(latent.up_NUC) // group.size
    heads = slice(group.rank * local, (group.rank + 1) * local)
    latent.up_NUC = latent.up_NUC[heads].clone()
    dim = latent.mla.nope_dim + latent.mla.rope_dim
    rows = slice(heads.start * dim, heads.stop * dim)
    if latent.q is not None:
        latent.q = _rows(_plain(latent.q), rows)
        return
    first = _plain(layer.qkv)
    queries, kv = first.weight.split([latent.query_size, len(first.weight) - latent.query_size])
    bias = None if first.bias is None else torch.cat((first.bias[rows], first.bias[latent.query_size :]))
    layer.qkv, latent.query_size = Dense(torch.cat((queries[rows], kv)), bias), local * dim


def _shard_mixture(mixture: MixtureOfExperts, group: Group, part: Experts) -> None:
    """Every rank has a shard of its experts; the router is replicated."""
    experts, shared = mixture.experts, mixture.shared
    own = part.own(mixture.moe.num_experts)

    def local_shard(weight: Tensor, dim: int, size: int = group.size, rank: int = group.rank) -> torch.nn.Parameter:
        return torch.nn.Parameter(weight.detach().chunk(size, dim)[rank].contiguous(), requires_grad=False)

    def of_experts(weight: Tensor, dim: int) -> torch.nn.Parameter:
        return local_shard(weight[own.start : own.stop], dim, part.tp, part.tp_rank)

    experts.up_E2FH, experts.down_EHF = of_experts(experts.up_E2FH, 1), of_experts(experts.down_EHF, 2)
    if experts.up_bias_E2F is not None and experts.down_bias_EH is not None:
        experts.up_bias_E2F = of_experts(experts.up_bias_E2F, 1)
        down_bias = experts.down_bias_EH.detach()[own.start : own.stop].clone()
        experts.down_bias_EH = torch.nn.Parameter(down_bias, requires_grad=False)
    if shared is not None:
        shared.up.weight, shared.down.weight = local_shard(shared.up.weight, 0), local_shard(shared.down.weight, 1)


class OwnExperts:
    """`MixtureOfExperts.dispatch` of a rank that has some of the experts: choices of others are dropped."""

    def __init__(self, dispatch: Dispatch, own: range) -> None:
        self.dispatch, self.own = dispatch, own

    def __call__(
        self, experts: AllExperts, x_MH: Tensor, weights_Mk: Tensor, experts_Mk: Tensor, overlapped: Overlapped
    ) -> tuple[Tensor, Tensor | None]:
        local_Mk, count = experts_Mk - self.own.start, len(self.own)
        local_Mk = local_Mk.where((local_Mk >= 0) & (local_Mk < count), count)
        return self.dispatch(experts, x_MH, weights_Mk, local_Mk, overlapped)


def divide_experts(mixture: MixtureOfExperts, part: Experts, kernels: EngineKernels) -> None:
    """Let a layer compute with its part of the experts only, whose results are added up over ranks."""
    if part.tp_rank:
        _drop_bias(mixture.experts)
    if part.parts == 1:
        return
    own = part.own(mixture.moe.num_experts)
    mixture.experts.moe = replace(mixture.moe, num_experts=len(own))
    grouped = None if isinstance(mixture.experts, PackedExperts) else kernels.grouped
    dispatch = plain_dispatch if grouped is None else SortedDispatch(grouped, drops=True)
    mixture.dispatch = OwnExperts(dispatch, own)


def _shard_head(head: LinearFn, vocab: int, group: Group, *, loaded: bool) -> LinearFn:
    """Vocabulary-parallel logits, all-gathered; a tied weight stays unsharded on each rank. A packed head is not
    sharded."""
    model: Any = getattr(head, "__self__", None)
    assert model is not None, "the head is the model's own"
    if isinstance(model.output or model.embedding, PackedLinear | PackedEmbedding):
        return head
    weight, bias = model.head_weights()
    share = -(-vocab // group.size)
    local_rows = slice(group.rank * share, min(vocab, (group.rank + 1) * share))
    short = share - (local_rows.stop - local_rows.start)
    own = weight if loaded and model.output is not None else weight[local_rows]
    part = Dense(own, None if bias is None else bias[local_rows])
    if model.output is not None:
        part.weight = part.weight if loaded else part.weight.clone()
        free_weights(model.output)

    def logits(x: Tensor) -> Tensor:
        local_BV = torch.nn.functional.pad(part(x), (0, short)) if short else part(x)
        return model.scaled_logits(all_gather(local_BV, group, dim=1)[:, :vocab])  # type: ignore[no-any-return]

    return logits


def _rows(linear: Dense, rows: slice) -> Dense:
    return Dense(linear.weight[rows].contiguous(), None if linear.bias is None else linear.bias[rows].contiguous())


def _columns(linear: Dense, columns: slice) -> Dense:
    return Dense(linear.weight[:, columns].contiguous(), linear.bias)


def _plain(linear: LinearFn) -> Dense:
    assert isinstance(linear, Dense), "weights are sharded before they are quantized"
    return linear


class Leader:
    """The executor of rank 0: sends steps before it runs them."""

    def __init__(self, executor: FastExecutor) -> None:
        self.executor = executor
        self._channel: StepSender | None = None
        self.leads = dist.get_rank() == 0  # whether it still sends steps

    @property
    def channel(self) -> StepSender:
        """Connected when it is first needed, once the other ranks `follow`."""
        if self._channel is None:
            self._channel = StepSender(dist.get_world_size())
        return self._channel

    def connect(self) -> None:
        """Wait until the other ranks `follow`."""
        assert self.channel

    def launch(self, decision: Decision) -> Launched:
        step = self.executor.encode(decision)
        masks = self.executor.masks(step, decision)
        self.channel.send(RankMessage(step=step, masks=masks))
        with torch.inference_mode():
            return self.executor.run(step, decision, masks)

    def tokens(self, launched: Launched) -> list[int]:
        return self.executor.tokens(launched)

    @property
    def expert_counters(self) -> ExpertCounters:
        """Every rank routes all tokens."""
        return self.executor.expert_counters

    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        """Write an adapter into a slot on every rank; the others read its folder themselves."""
        self.channel.send(RankMessage(adapter=(slot, str(adapter.folder))))
        adapters = self.executor.forward.adapters
        assert adapters is not None
        adapters.put(slot, adapter)

    def stop(self) -> None:
        """Stop the other ranks."""
        self.leads = False
        self.channel.send(RankMessage())
        self.channel.close()


class Reports(Protocol):
    """Tells rank 0 what a step gave on this rank (`step_reports`)."""

    error: Exception | None
    """why it could not, so that the connection was ended"""

    def put(self, launched: Launched) -> None: ...

    def close(self) -> None: ...


class Obeys(Protocol):
    """Exchanges this rank's part of KV blocks with another engine (`engine/disaggregation`)."""

    def obey(self, order: dict[str, Any]) -> None: ...


def follow(
    executor: FastExecutor,
    transfer: Obeys | None = None,
    make_reports: Callable[[StepReceiver], Reports] | None = None,
) -> int:
    """On the other ranks: run the steps that rank 0 sends until it stops; returns their number. RankGone where it ends
    without stopping them."""
    channel, count = StepReceiver(dist.get_rank()), 0
    reports = None if make_reports is None else make_reports(channel)
    while True:
        message = channel.receive()
        if message is None:
            if reports is not None and reports.error is not None:
                raise reports.error
            raise RankGone("rank 0 has ended; restart the engine")
        if message.adapter is not None:
            slot, folder = message.adapter
            adapters = executor.forward.adapters
            assert adapters is not None
            adapters.put(
                slot, read_adapter(folder, executor.forward.model.config, max_rank=adapters.rank, on=adapters.on)
            )
        elif message.transfer is not None:
            assert transfer is not None
            transfer.obey(message.transfer)
        elif message.step is None:
            if reports is not None:
                reports.close()
            channel.close()
            return count
        else:
            if executor.forward.gathered_tokens is not None:
                executor.forward.gathered_tokens.sizes = message.sizes
            with torch.inference_mode():
                launched = executor.run(message.step, Decision(count), message.masks)
            if reports is not None and not message.step.is_empty:
                reports.put(launched)
            count += 1
