"""Builds an engine from its parts: scheduler, KV cache, executor, loop and output text."""

import random
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import torch
from torch import Tensor, nn

from armillary.engine.adapter_table import AdapterTable
from armillary.engine.build_linears import fit_cpu
from armillary.engine.build_offload import measured_costs
from armillary.engine.build_speculation import make_draft, speculate, step_rows
from armillary.engine.cache.kv_cache import KVCache
from armillary.engine.cache.kv_capacity import KVPlan, plan_kv
from armillary.engine.engine import Engine, Record
from armillary.engine.output.output_text import NoText, OutputProcessor
from armillary.engine.runner.adapter_slots import AdapterSlots
from armillary.engine.runner.executor import FastExecutor
from armillary.engine.runner.kv_memory_budget import kv_budget
from armillary.engine.runner.linear.linear_formats import pick_fp8, to_fp8
from armillary.engine.runner.linear.sparse_linear import to_sparse
from armillary.engine.runner.rank_layout import RankLayout
from armillary.engine.runner.ranks.dp_leader import DpLeader, gather_tokens
from armillary.engine.runner.ranks.stage_leader import StageLeader
from armillary.engine.runner.tensor_parallel import Leader, local_kv_heads, shard
from armillary.engine.scheduler.decision import StepWork
from armillary.engine.scheduler.dp_scheduler import DpScheduler
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.engine.scheduler.settings import Settings, settings_for
from armillary.engine.scheduler.step_loop import Loop
from armillary.engine.scheduler.step_time import step_roofline
from armillary.engine.telemetry.step_calibration import calibrate_steps
from armillary.errors import BadInput
from armillary.kernels.core.dtype import DTYPES
from armillary.kernels.core.requirements import lacking
from armillary.kernels.paged.cache_codes import CACHE_DTYPES, largest_code
from armillary.model.device import fit_threads
from armillary.model.multi_token import MtpLayer
from armillary.model.quantized.packed_linear import packed_modules
from armillary.model.text.tokenizer import Detokenizer, Tokenizer
from armillary.model.transformer import Transformer
from armillary.model.weights.adapter_folder import Adapter
from armillary.parallel.collectives import all_reduce
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve
from armillary.store.peaks import Peaks
from armillary.units import bytes_text

Phase = Callable[[str, float], None]  # (part of an engine's start, its seconds)
_CALIBRATION_S = {"cuda": 0.5, "cpu": 1.5}  # time for step calibration at the start, where records are kept


def make_engine(
    model: Transformer,
    tokenizer: Tokenizer | None,
    serve: Serve,
    *,
    record: Record | None = None,
    seed: int | None = None,
    phase: Phase | None = None,
    ranks: RankLayout | None = None,
    peaks: Peaks | None = None,
    warm: bool = True,
    owns_model: bool = False,
    eos_ids: Items[int] = (),
    draft: Transformer | MtpLayer | None = None,
) -> tuple[Engine, KVPlan]:
    """`seed` generates the seeds of requests without one; `phase` gets the seconds of each part of the start. With a
    `ranks` layout the model is sharded over them; the first rank's engine leads, the others follow. Without `warm`, for
    few requests, a CUDA graph is captured when its shape first comes instead of at the start. An engine that
    `owns_model` frees weights that it keeps in another form. `eos_ids` count where there is no tokenizer. `draft` is
    the model of serve.draft, or the model's own layer where serve.speculate is mtp."""
    on_phase, device_type = phase or (lambda name, seconds: None), next(model.parameters()).device.type
    begin = time.monotonic()
    fit_threads()
    if serve.threads is not None and device_type == "cpu":
        torch.set_num_threads(max(1, serve.threads // (ranks.world.size if ranks is not None else 1)))
    refuse_packed(model, serve)
    refuse_drafts(model.config, serve)
    refuse_offload(model.config, serve)
    settings = settings_for(model.config, serve, frozenset(tokenizer.eos_ids if tokenizer else eos_ids))
    run_fp8 = pick_fp8(model.blocks["0"].attention.out.weight, settings.max_running) if serve.weights == "fp8" else None
    executor = make_executor(model, settings, serve, seed, ranks)
    if device_type == "cpu":
        fit_cpu(executor, serve, ranks, let_go=owns_model)
    if run_fp8 is not None:
        to_fp8(executor.forward, run_fp8, let_go=owns_model)
    if serve.weights == "2:4":
        to_sparse(executor.forward, let_go=owns_model)
    draft_model = make_draft(executor, serve, draft, ranks, serve.block_tokens)
    other_bytes = 0 if draft_model is None else draft_model.block_bytes
    plan = kv_plan(executor, serve, settings.max_model_len, ranks, warm=warm, other_bytes=other_bytes)
    plan = replace(plan, host_bytes=int(plan.host_bytes * plan.block_bytes / (plan.block_bytes + other_bytes)))
    caches = [plan.make(prefix=serve.prefix_cache) for _ in range(plan.dp)]
    cache = caches[0]
    settings = replace(settings, max_model_len=_fitting_len(settings, serve, plan, cache), late_masks=ranks is None)
    host_blocks = 0 if cache.offload is None else cache.offload.num_blocks
    executor.rows.allocate(cache.pool.num_blocks, host_blocks)
    if draft_model is not None:
        draft_model.allocate(cache.pool.num_blocks, host_blocks)
    if cache.offload is not None:
        cache.offload.costs = measured_costs(executor, settings.attention_tokens)
    scheduler = Scheduler(settings, cache) if plan.dp == 1 else DpScheduler(settings, caches)
    on_phase("kernels and KV cache", time.monotonic() - begin)
    begin = time.monotonic()
    if warm and (graphs := executor.warm()):
        on_phase(f"{graphs} CUDA graphs", time.monotonic() - begin)
    if draft_model is not None and warm:
        draft_model.executor.warm()
    speculate(scheduler, executor, serve, draft_model, ranks)
    leader = _leader(executor, ranks)
    loop = Loop(scheduler, leader, overlap=serve.decides_ahead(device_type))
    if record is not None and warm and ranks is None:
        begin = time.monotonic()
        for gauges in calibrate_steps(executor, scheduler.cache, settings, _CALIBRATION_S[device_type]):
            record(gauges)
            loop.times.learn(StepWork.of(gauges), gauges["calibration_step_s"])
        on_phase("calibration", time.monotonic() - begin)
    executor.expert_counters.reset()
    texts = OutputProcessor(scheduler, (lambda: Detokenizer(tokenizer)) if tokenizer else NoText)
    roofline = step_roofline(model.config, peaks, _dtype_name(model))
    expert_layers = tuple(int(name) for name in model.blocks if model.config.layers[int(name)].mlp == "moe")
    engine = Engine(loop, texts, record=record, roofline=roofline, expert_layers=expert_layers)
    engine.adapters = _adapter_table(executor, leader, scheduler, serve)
    return engine, plan


def _leader(executor: FastExecutor, ranks: RankLayout | None) -> FastExecutor | Leader:
    """What the loop gives its decisions to."""
    if ranks is None:
        return executor
    if ranks.pipeline is not None:
        return StageLeader(executor, ranks)
    return Leader(executor) if ranks.dp is None else DpLeader(executor, ranks)


def _adapter_table(
    executor: FastExecutor, leader: FastExecutor | Leader, scheduler: Scheduler, serve: Serve
) -> AdapterTable:
    """The LoRA adapters that requests may name, none at first."""
    slots = executor.forward.adapters

    def install(slot: int, adapter: Adapter) -> None:
        assert slots is not None
        if isinstance(leader, Leader):
            leader.put_adapter(slot, adapter)
        else:
            slots.put(slot, adapter)

    table = AdapterTable(
        executor.forward.model.config,
        scheduler.request_table,
        install,
        slots=0 if slots is None else slots.num_slots,
        serve=serve,
    )
    for encoder in leader.encoders if isinstance(leader, DpLeader) else [executor.encoder]:
        encoder.slot_of = table.slot_of
    return table


def refuse_packed(model: Transformer, serve: Serve) -> None:
    """BadInput where packed weights would be quantized again."""
    if packed_modules(model) and serve.weights != "auto":
        raise BadInput(f"{model.config.name} is already quantized; leave serve.weights=auto")


def refuse_drafts(config: ModelConfig, serve: Serve) -> None:
    """BadInput for draft tokens of a model whose states cannot go back over those that are rejected."""
    if serve.speculate != "none" and config.num_recurrent_layers:
        raise BadInput(
            f"{config.name} has recurrent states, which cannot be rolled back over rejected draft tokens; leave "
            "serve.speculate=none"
        )


def refuse_offload(config: ModelConfig, serve: Serve) -> None:
    """BadInput for KV blocks in host memory of a model that has no prefix cache."""
    if serve.kv_host_bytes and config.num_recurrent_layers:
        raise BadInput(
            f"{config.name} has recurrent states, which blocks do not hold, so it has no prefix cache to keep in host "
            "memory; leave serve.kv_host_bytes=0"
        )


def make_executor(
    model: Transformer, settings: Settings, serve: Serve, seed: int | None, ranks: RankLayout | None = None
) -> FastExecutor:
    """The executor of a recipe, its weights sharded and quantized where the recipe says so, with the fewest KV blocks:
    the memory left for them is known once everything else is allocated."""
    plan = _plan(model, serve, None, ranks)
    weight, rng, tp = next(model.parameters()), random.Random(seed), 1 if ranks is None else ranks.tp.size
    if serve.weights == "int8" and weight.device.type != "cpu":
        raise BadInput("weights in int8 are for a CPU; leave serve.weights=auto, or take --device cpu")
    kv_dtype = CACHE_DTYPES.get(plan.dtype) or DTYPES[plan.dtype]
    _check_cache(model, plan.dtype, ranks)
    executor = FastExecutor(
        model,
        plan.make(prefix=False),
        max_running=settings.max_running,
        max_model_len=settings.max_model_len,
        max_tokens=settings.max_tokens_per_step,
        new_seed=lambda: rng.getrandbits(61),
        graphs=serve.graphs,
        kv_dtype=kv_dtype,
        kv_heads=local_kv_heads(model.config, tp),
        ranks=tp,
        max_rows=step_rows(serve),
        adapters=_adapter_slots(model, serve, ranks),
    )
    if ranks is not None:
        if ranks.pipeline is not None:
            ranks.pipeline.allocate(max(executor.max_tokens, executor.max_rows), model.config.hidden, weight)
        executor.forward.pipeline = ranks.pipeline
        if tp > 1:
            shard(executor, model.config, ranks.tp, ranks.experts)
        if ranks.dp is not None:
            gather_tokens(executor, ranks)
    if plan.dtype in CACHE_DTYPES:
        _scale(executor, kv_dtype)
    return executor


def _adapter_slots(model: Transformer, serve: Serve, ranks: RankLayout | None) -> AdapterSlots | None:
    """Memory for serve.max_adapters LoRA adapters; None where the engine takes none."""
    if not serve.max_adapters:
        return None
    weight = next(model.parameters())
    return AdapterSlots(
        model.config,
        slots=serve.max_adapters,
        rank=serve.adapter_rank,
        on=serve.adapter_on,
        dtype=weight.dtype,
        device=weight.device,
        group=ranks.tp if ranks is not None and ranks.tp.size > 1 else None,
    )


def _check_cache(model: Transformer, kv_dtype: str, ranks: RankLayout | None) -> None:
    """BadInput for a cache dtype that the device or the model does not have."""
    device = next(model.parameters()).device.type
    if kv_dtype in CACHE_DTYPES and model.config.mla is not None:
        raise BadInput("latents are not cached in 8 bits yet; leave serve.kv_dtype=auto")
    if kv_dtype in CACHE_DTYPES and any(kind.attention == "2-simplicial" for kind in model.config.layers):
        raise BadInput("keys and values of 2-simplicial layers are not cached in 8 bits yet; leave serve.kv_dtype=auto")
    if kv_dtype == "fp8" and device != "cpu" and lacking(("fp8",), device):
        raise BadInput("a KV cache in fp8 is for a GPU of compute capability 8.9 or more; leave serve.kv_dtype=auto")
    if kv_dtype != "int8":
        return
    if device != "cpu":
        raise BadInput("a KV cache in int8 is for a CPU; take serve.kv_dtype=fp8, or leave it auto")
    if ranks is not None:
        raise BadInput("a KV cache in int8 is not sharded yet; set layout.tp=1, or leave serve.kv_dtype=auto")
    if any(_kv_range(block) is None for block in model.blocks.values()):
        raise BadInput(
            f"{model.config.name} has no scales for a KV cache in int8; calibrate them with armillary quantize --kv "
            "int8, or take serve.kv_dtype=fp8"
        )


def _scale(executor: FastExecutor, kv_dtype: torch.dtype) -> None:
    """Scales of an 8-bit KV cache: the checkpoint's, or 1, with which fp8's range suffices (vLLM's default too)."""
    shape = 2, executor.rows.blocks.shape[3]
    for layer, block in zip(executor.forward.layers, executor.forward.model.blocks.values(), strict=True):
        range_2K = _kv_range(block)
        scales_2K = torch.ones(2, 1) if range_2K is None else range_2K / largest_code(kv_dtype)
        if scales_2K.shape != shape:  # of a shard: the largest serves every head
            scales_2K = scales_2K.amax(dim=1, keepdim=True).expand(shape).contiguous()
        scales_2K = scales_2K.to(executor.device)
        layer.heads = replace(layer.heads, scales_2K=scales_2K)
        layer.options = replace(layer.options, scales_2K=scales_2K)


def _kv_range(block: nn.Module) -> Tensor | None:
    return getattr(block.attention, "kv_range_2K", None)


def kv_plan(
    executor: FastExecutor,
    serve: Serve,
    max_model_len: int,
    ranks: RankLayout | None = None,
    *,
    warm: bool = True,
    other_bytes: int = 0,
) -> KVPlan:
    """A cache of serve.kv_bytes, or of what serve.memory_fraction leaves (on the rank with the least), but no more than
    a full batch can use. A draft model has `other_bytes` of its own per block, which are part of both."""
    model = executor.forward.model
    own = _plan(model, serve, None, ranks).block_bytes
    share = own / (own + other_bytes)
    if serve.kv_bytes is not None:
        return _plan(model, serve, int(serve.kv_bytes * share), ranks)
    unlimited = _plan(model, serve, 1 << 62, ranks)
    useful = (unlimited.blocks_of(max_model_len) * serve.max_running + 1) * unlimited.block_bytes
    left = kv_budget(executor, serve.memory_fraction, graphs=warm)
    if ranks is not None:
        left = int(all_reduce(torch.tensor([left], device=executor.device), ranks.world, "min"))
    return _plan(model, serve, min(useful, int(left * share)), ranks)


def _plan(model: Transformer, serve: Serve, num_bytes: int | None, ranks: RankLayout | None) -> KVPlan:
    """A cache of so many bytes per rank; none: the smallest, the null block and one more."""
    tp, dtype = 1 if ranks is None else ranks.tp.size, _dtype_name(model)
    pp, dp = (1, 1) if ranks is None else (serve.pp, serve.dp_attention)
    plan = plan_kv(model.config, serve, num_bytes or 1 << 62, dtype=dtype, tp=tp, pp=pp, dp=dp)
    return plan if num_bytes is not None else replace(plan, budget_bytes=2 * plan.block_bytes)


def _fitting_len(settings: Settings, serve: Serve, plan: KVPlan, cache: KVCache) -> int:
    """Longest prompt and output together: the model's context, or what the cache holds; BadInput where the recipe wants
    more."""
    wanted = settings.max_model_len
    longest = cache.longest(wanted)
    if longest < wanted and serve.max_model_len is not None:
        needed = (cache.blocks_at(wanted) + 1) * plan.block_bytes
        raise BadInput(
            f"serve.max_model_len={wanted} needs {bytes_text(needed)} of KV cache and there are "
            f"{bytes_text(plan.budget_bytes)}; try --set serve.max_model_len={longest} or --set "
            f"serve.kv_bytes={needed}"
        )
    return longest


def _dtype_name(model: Transformer) -> str:
    return next(name for name, known in DTYPES.items() if known == next(model.parameters()).dtype)
