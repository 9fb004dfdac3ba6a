"""What is asked for: the recipe tables [data], [train], [serve], [traffic], [objective] and [cost].

Few dials with good defaults; what is left out is derived by the rule in its docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from armillary.errors import BadRecipe
from armillary.spec.blend import shares
from armillary.spec.lora import check_names


def _refuse(job: Any, table: str, name: str, rule: str, better: Any = None) -> BadRecipe:
    """A sentence that suggests `better`, or the field's default, which is always sound."""
    default = getattr(type(job), name) if better is None else better
    shown = "none" if default is None else default
    return BadRecipe(f"{table}.{name}={getattr(job, name)} must be {rule}; try --set {table}.{name}={shown}")


def _at_least(job: Any, table: str, low: float, *names: str) -> None:
    """Each is finite and no less than `low`; a None is derived elsewhere."""
    for name in names:
        value = getattr(job, name)
        if value is not None and not (isfinite(value) and value >= low):
            raise _refuse(job, table, name, f"at least {low:g}")


def _above_zero(job: Any, table: str, *names: str, most: float = float("inf")) -> None:
    for name in names:
        value = getattr(job, name)
        if value is not None and not (isfinite(value) and 0 < value <= most):
            raise _refuse(job, table, name, "above 0" if most > 1 else f"above 0 and at most {most:g}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read: text to prepare, or prepared shards."""

    source: str = "stdlib"
    """text or prepared shards: a file, a folder, a glob, a URL of any fsspec store, or stdlib: Python's own library"""
    blend: Mapping[str, float] = field(default_factory=dict)
    """several sources with weights, in place of source: rows of each in this proportion, exact to one row"""
    key: str = "text"
    """what holds the text: key of JSONL records, column of Parquet files, suffix of WebDataset samples"""
    format: Literal["text", "chat"] = "text"
    """chat: records with messages, or a prompt and a response; only answers are learnt"""
    template: str = ""
    """chat: a file with a chat template, or chatml or plain; empty: the tokenizer's own"""
    tokenizer: str = ""
    """folder with a tokenizer.json; empty: the model's own, or one trained on the source"""
    vocab: int | None = None
    """ids of a trained tokenizer; none: as many as the model has"""
    held_out: float = 0.01
    """share of the documents kept for validation"""
    shuffle: bool = False
    """mix documents when text is prepared, so that neighbours in a row come from anywhere"""
    path: str = ""
    """folder of prepared shards; empty: kept in the store, named after source and settings"""
    paths: tuple[str, ...] = ()
    """the same for a blend: a folder for each source, in the order of their names"""
    packing: Literal["stream", "whole"] = "stream"
    """rows: cut from one stream of documents, or filled with whole documents (best fit), which leaves some padding"""
    mix_shards: int = 0
    """shards whose rows are mixed with each other, others follow: for stores larger than the cache; 0: all"""
    cache: str = ""
    """folder for what is fetched from stores; empty: in the user's cache"""
    cache_bytes: int = 100_000_000_000
    """size of that folder at most: what was not used for longest goes first"""
    verify: bool = True
    """compare each shard with its checksum when it is first read on this machine; sizes are always checked"""
    seed: int = 0
    """of the held-out choice and of the sample order"""
    workers: int = 0
    """loader processes of each rank; 0: a thread of the training process reads ahead"""

    def __post_init__(self) -> None:
        if not self.source.strip() and not self.path:
            raise _refuse(self, "data", "source", "a file, a folder or stdlib")
        _at_least(self, "data", 256, "vocab")
        _at_least(self, "data", 0, "seed", "workers", "held_out", "mix_shards")
        _at_least(self, "data", 1, "cache_bytes")
        if not self.held_out < 1:
            raise _refuse(self, "data", "held_out", "below 1")
        self._check_blend()

    def _check_blend(self) -> None:
        if self.blend and (self.path or self.source != type(self).source):
            other = f"data.path={self.path}" if self.path else f"data.source={self.source}"
            raise BadRecipe(f"data.blend and {other} exclude each other; make it one of the blend, or leave it out")
        if self.blend:
            shares(self.blend)
        if self.paths and len(self.paths) != len(self.blend):
            raise _refuse(self, "data", "paths", f"one folder for each source of data.blend ({len(self.blend)})", "")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """How long and how fast to train."""

    sequence: int = 1024
    """tokens of a sequence"""
    batch_tokens: int = 65_536
    """tokens of a step, over all ranks and micro-batches"""
    steps: int = 1000
    """optimiser steps"""
    lr: float | None = None
    """peak learning rate; none: 3e-4·(7e9/N)^⅓, N the parameters, at most 3e-3 (through Llama 7B, 65B and 405B);
    adapters 2e-4"""
    lr_base_batch: int | None = None
    """tokens of the batch that lr is meant for: the rate is multiplied by batch_tokens over it; none: taken as it is"""
    min_lr: float | None = None
    """learning rate at the end, multiplied like lr where lr_base_batch is given; none: a tenth of the peak"""
    warmup_steps: int | None = None
    """steps of linear warm-up; none: a tenth of the steps, at most 2000"""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """how the learning rate falls after the warm-up; wsd stays at the peak and then falls"""
    decay_fraction: float = 0.2
    """wsd: share of the steps over which it falls"""
    weight_decay: float = 0.1
    """AdamW's, on matrices only"""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's averaging of gradients and of their squares"""
    eps: float = 1e-8
    """AdamW's, added to the root"""
    clip: float = 1.0
    """largest gradient norm; 0: no clipping"""
    seed: int = 0
    """of the initial weights and of dropout"""
    eval_every: int = 50
    """steps between validations; 0: only at the end"""
    eval_batches: int = 8
    """batches a validation reads"""
    save_every: int = 0
    """steps between checkpoints; 0: only at the end and when it is stopped"""
    profile_every: int = 100
    """steps between short recordings that split a step into compute, communication and overhead; 0: none"""
    log_every: int = 1
    """steps between records in gauges.jsonl"""
    compile: bool = False
    """compile the blocks with torch.compile"""
    deterministic: bool = False
    """bit-equal results on the same machine; slower, and no kernel is chosen by timing"""
    loss_chunk: int | None = None
    """tokens whose logits exist at once; none: about 64 MB of logits but at least 1024 tokens, 0: all at once"""
    lora_rank: int = 0
    """rank of adapters trained beside frozen weights; 0: every weight is trained"""
    lora_alpha: float | None = None
    """adapters are scaled by alpha / rank; none: twice the rank"""
    lora_on: tuple[str, ...] = ("qkv", "out", "gate_up", "down")
    """projections with adapters: qkv (or q, k, v), out, gate_up (or gate, up), down"""
    lora_dropout: float = 0.0
    """share of an adapter's inputs left out at random"""
    balance_loss: float | None = None
    """weight of the routers' balance loss, a mean over sequences and layers that is 1 where all experts are used alike;
    none: the model's own (model.moe.aux_loss)"""
    router_z_loss: float = 0.0
    """weight of the mean square of log Σ exp of the routers' logits, which keeps them small; usual: 1e-3"""
    bias_rate: float = 2e-3
    """how far the selection bias of an expert moves a step at most, up where it is used too little, down where too much
    (models with model.moe.selection_bias)"""
    expert_capacity: float | None = None
    """places of an expert in each sequence, times the fair share; choices beyond are dropped; none: nothing is"""
    track: tuple[Literal["tensorboard", "mlflow", "wandb"], ...] = ()
    """where gauges also go: tensorboard, mlflow, wandb"""

    def __post_init__(self) -> None:
        _at_least(self, "train", 1, "sequence", "batch_tokens", "steps", "eval_batches", "log_every")
        _at_least(self, "train", 0, "min_lr", "warmup_steps", "clip", "weight_decay", "seed", "eval_every")
        _at_least(self, "train", 0, "lora_rank", "lora_dropout")
        _above_zero(self, "train", "lora_alpha")
        check_names(self.lora_on)
        _at_least(self, "train", 0, "save_every", "loss_chunk", "profile_every")
        _at_least(self, "train", 1, "lr_base_batch")
        _at_least(self, "train", 0, "balance_loss", "router_z_loss", "bias_rate")
        _above_zero(self, "train", "expert_capacity")
        _above_zero(self, "train", "lr", "eps")
        _above_zero(self, "train", "decay_fraction", most=1)
        self._check_together()

    def _check_together(self) -> None:
        if not self.lora_dropout < 1:
            raise _refuse(self, "train", "lora_dropout", "below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise _refuse(self, "train", "betas", "two numbers below 1", "0.9,0.95")
        if self.batch_tokens < self.sequence:
            raise _refuse(self, "train", "batch_tokens", f"a sequence of {self.sequence} at least", self.sequence)
        if self.warmup > self.steps:
            raise _refuse(self, "train", "warmup_steps", f"at most train.steps={self.steps}", self.steps // 10)
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise _refuse(self, "train", "min_lr", f"at most train.lr={self.lr}")

    @property
    def total_tokens(self) -> int:
        return self.batch_tokens * self.steps

    @property
    def warmup(self) -> int:
        """Warm-up steps, given or derived."""
        return min(2000, self.steps // 10) if self.warmup_steps is None else self.warmup_steps

    def peak_lr(self, num_parameters: int) -> float:
        """Given, or 3e-4·(7e9/N)^⅓ up to 3e-3. The rule passes through the published rates of Llama 7B (3e-4) and 65B
        (1.5e-4; arXiv 2302.13971, table 2) and of Llama 3 405B (8e-5; arXiv 2407.21783, section 3.4.1). Adapters: 2e-4,
        as QLoRA trained 7B and 13B (arXiv 2305.14314, appendix B)."""
        derived: float = 2e-4 if self.lora_rank else min(3e-3, 3e-4 * (7e9 / num_parameters) ** (1 / 3))
        return (derived if self.lr is None else self.lr) * self.lr_factor

    @property
    def lr_factor(self) -> float:
        """What the batch makes of the rate: k times the tokens, k times the rate (the linear scaling rule, Goyal et
        al., arXiv 1706.02677, section 2.1; its warm-up is ours)."""
        return self.batch_tokens / self.lr_base_batch if self.lr_base_batch else 1.0

    def final_lr(self, num_parameters: int) -> float:
        """Given, or a tenth of the peak (Hoffmann et al., Chinchilla, arXiv 2203.15556)."""
        return self.peak_lr(num_parameters) / 10 if self.min_lr is None else self.min_lr * self.lr_factor

    def check_rates(self, num_parameters: int) -> None:
        """Refuse a final rate above a peak that was derived: it would rise to the end."""
        peak = self.peak_lr(num_parameters) / self.lr_factor
        if self.min_lr is not None and self.min_lr > peak:
            raise _refuse(self, "train", "min_lr", f"at most the peak learning rate of {peak:.3g}", f"{peak / 10:.2g}")

    @property
    def lora_scale(self) -> float:
        """What adapters are multiplied by: alpha / rank."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / max(1, self.lora_rank)

    def chunk_tokens(self, vocab: int) -> int:
        """Tokens whose logits exist at once; 0: all."""
        return max(1024, 64_000_000 // (4 * vocab)) if self.loss_chunk is None else self.loss_chunk


@dataclass(frozen=True, kw_only=True)
class Serve:
    """How the engine is set up."""

    max_model_len: int | None = None
    """longest prompt and answer together; none: the model's context"""
    kv_bytes: int | None = None
    """size of the KV cache on a device; none: what is left when weights and working memory are in"""
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """number format of the KV cache; auto: that of the activations"""
    weights: Literal["auto", "int8", "fp8"] = "auto"
    """number format of the layers' weights; auto: as loaded; rounded when they are loaded: int8 on a CPU, fp8 on a
    GPU"""
    block_tokens: int = 16
    """tokens of a KV block"""
    max_tokens_per_step: int = 2048
    """token budget of an engine step: decodes first, prefill chunks fill the rest"""
    max_running: int = 256
    """requests decoded together at most"""
    batching: Literal["none", "static", "dynamic", "continuous"] = "continuous"
    """how requests are put together; all but continuous are there to be compared with it"""
    prefix_cache: bool = True
    """keep the KV blocks of finished prompts for those that begin alike"""
    prefill_tokens: int | None = None
    """prompt tokens a step while others decode, at most, to keep their gaps even; none: what the step has left"""
    prefill_slowdown: float | None = None
    """with prompts in it, a step lasts at most so many times what its decodes take alone, learnt from steps before;
    none: as long as it takes"""
    max_waiting: int | None = None
    """requests in the queue at most; more are refused at once; none: no limit"""
    max_wait_s: float | None = None
    """a request that has not started by then is given up; none: it waits"""
    ageing_s: float = 0.0
    """waiting time that makes up for one step of priority, so nobody starves; 0: first come, first served"""
    batch_window_s: float = 0.05
    """dynamic batching: how long the first of a batch waits for others"""
    overlap: bool = True
    """decide the next step while one runs"""
    graphs: bool = True
    """steps as CUDA graphs, where there is a GPU; captured when the engine starts"""
    check_every: int = 0
    """steps between checks of every invariant of scheduler and cache; 0: never"""
    max_answer: int | None = None
    """server: tokens of an answer at most; none: what the model's length leaves"""
    max_body_bytes: int = 4_000_000
    """server: size of a request's body at most"""
    timeout_s: float | None = 600.0
    """server: a request is given up so long after it came; none: never"""
    drain_s: float = 30.0
    """server: on SIGTERM, how long requests under way may take to finish"""
    frozen_s: float = 5.0
    """server: an engine that is silent for so long is not ready"""
    hung_s: float | None = 120.0
    """server: an engine that is silent for so long is ended and started again; none: never"""

    def __post_init__(self) -> None:
        _at_least(self, "serve", 1, "max_model_len", "kv_bytes", "block_tokens", "max_tokens_per_step", "max_running")
        _at_least(self, "serve", 1, "prefill_tokens", "max_answer", "max_body_bytes")
        _at_least(self, "serve", 0, "max_waiting", "ageing_s", "batch_window_s", "check_every", "drain_s")
        _above_zero(self, "serve", "max_wait_s", "timeout_s", "frozen_s", "hung_s")
        if self.prefill_slowdown is not None and not 1.0 < self.prefill_slowdown < float("inf"):
            raise _refuse(self, "serve", "prefill_slowdown", "above 1: prompts take some time", 2.0)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What arrives."""

    requests_per_s: float = 1.0
    """mean arrival rate"""
    tokens_in: int = 512
    """mean prompt length"""
    tokens_out: int = 128
    """mean answer length"""
    arrival: Literal["poisson", "gamma", "constant"] = "poisson"
    """how arrivals are spaced"""
    burstiness: float = 1.0
    """gamma: coefficient of variation of the gaps; 1 is Poisson, more is burstier"""
    shared_prefix: int = 0
    """prompt tokens that all requests have in common"""
    duration_s: float = 60.0
    """how long a load test or simulation lasts"""
    seed: int = 0
    """of arrivals and prompts"""

    def __post_init__(self) -> None:
        _above_zero(self, "traffic", "requests_per_s", "burstiness", "duration_s")
        _at_least(self, "traffic", 1, "tokens_in", "tokens_out")
        _at_least(self, "traffic", 0, "shared_prefix", "seed")
        if self.shared_prefix > self.tokens_in:
            raise _refuse(self, "traffic", "shared_prefix", f"at most tokens_in={self.tokens_in}")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What serving must meet; what is left out is not asked for."""

    ttft_p99_s: float | None = None
    """time to first token, 99th percentile"""
    itl_p99_s: float | None = None
    """gap between consecutive tokens, 99th percentile"""
    tpot_p99_s: float | None = None
    """(end-to-end − TTFT) / (tokens − 1), 99th percentile"""
    e2e_p99_s: float | None = None
    """request sent to last token, 99th percentile"""

    def __post_init__(self) -> None:
        _above_zero(self, "objective", "ttft_p99_s", "itl_p99_s", "tpot_p99_s", "e2e_p99_s")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What devices cost: rented by the hour, or owned."""

    owned: bool = False
    """bought rather than rented"""
    usd_per_device_hour: float | None = None
    """rent of one device; none: the provider's in the catalogue"""
    provider: str = ""
    """who rents it out; empty: the median of all"""
    spot: bool = False
    """interruptible offers"""
    usd_per_device: float | None = None
    """purchase of one device with its share of the node; none: the catalogue's reported price"""
    years: float = 4.0
    """owned: time over which the purchase is written off"""
    utilisation: float = 0.8
    """owned: share of that time in use"""
    usd_per_kwh: float = 0.1
    """owned: price of electricity"""
    pue: float = 1.3
    """owned: power of the whole site over power of the machines, cooling included"""
    staff_usd_per_year: float = 0.0
    """owned: people, for all devices together"""

    def __post_init__(self) -> None:
        _at_least(self, "cost", 0, "usd_per_device_hour", "usd_per_device", "usd_per_kwh", "staff_usd_per_year")
        _at_least(self, "cost", 1, "pue")
        _above_zero(self, "cost", "years")
        _above_zero(self, "cost", "utilisation", most=1)
