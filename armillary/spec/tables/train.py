"""Training in a recipe: the tables [data] and [train], and the proportions of a data blend.

Few settings with good defaults; what is left out is derived by the rule in its docstring.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, isfinite, lcm
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.lora import check_names
from armillary.spec.tables.checks import above_zero, at_least, refuse
from armillary.spec.tables.resume_class import Defining, Free, Noted

OnHang = Literal["exit", "restart", "wait"]
AXIS_TIMEOUTS_S: Mapping[str, float] = {"tp": 300.0, "cp": 300.0, "ep": 300.0, "dp": 450.0, "pp": 600.0}
"""chosen, not measured: shorter on inner axes, so that the neighbours of a lost rank report it before ranks that only
wait for those; long enough for ranks that compile, or write a checkpoint, at different speeds"""
LONGEST = 100_000
"""most rows per round: its table is in memory"""


def shares(blend: Mapping[str, float]) -> tuple[tuple[str, int], ...]:
    """(source, rows per round) of a blend, sorted by name, as the smallest integers in proportion: 0.7 to 0.3 is
    7 of every 10 rows, so that the proportion is exact after each round, however long a run is."""
    for source, weight in blend.items():
        if not source.strip():
            raise BadRecipe('a source of data.blend has no name; write it like blend = { stdlib = 3, "books" = 1 }')
        if not (isfinite(weight) and weight > 0):
            raise BadRecipe(f"the weight {weight:g} of '{source}' in data.blend must be above 0; leave the source out")
    exact = {source: Fraction(str(weight)) for source, weight in sorted(blend.items())}
    unit = lcm(*(weight.denominator for weight in exact.values()))
    weights = {source: int(weight * unit) for source, weight in exact.items()}
    common = gcd(*weights.values())
    rows = sum(weights.values()) // common
    if rows > LONGEST:
        total = sum(weights.values())  # per mille, at least one
        better = ", ".join(f'"{source}" = {max(1, round(1000 * count / total))}' for source, count in weights.items())
        raise BadRecipe(f"the weights of data.blend repeat only after {rows:,} rows; round them, as in {{ {better} }}")
    return tuple((source, count // common) for source, count in weights.items())


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: text to prepare, or prepared shards."""

    source: Defining[str] = "stdlib"
    """text or prepared shards: a file, a folder, a glob, a URL of any fsspec store, or stdlib: Python's own library"""
    blend: Defining[Mapping[str, float]] = field(default_factory=dict)
    """several sources with weights, in place of source: rows of each in this proportion, exact to one row"""
    key: Defining[str] = "text"
    """where the text is: key of JSONL records, column of Parquet files, suffix of WebDataset samples"""
    format: Defining[Literal["text", "chat"]] = "text"
    """chat: records with messages, or a prompt and a response; only responses are trained on"""
    template: Defining[str] = ""
    """chat: a file with a chat template, or chatml or plain; empty: the tokenizer's own"""
    tokenizer: Defining[str] = ""
    """folder with a tokenizer.json; empty: the model's own, or one trained on the source"""
    vocab: Defining[int | None] = None
    """vocabulary of a trained tokenizer; none: the model's"""
    held_out: Defining[float] = 0.01
    """share of the documents held out for validation"""
    shuffle: Defining[bool] = False
    """shuffle documents when text is prepared"""
    path: Defining[str] = ""
    """folder of prepared shards; empty: in the store, named after source and settings"""
    paths: Defining[tuple[str, ...]] = ()
    """the same for a blend: one folder per source, in the order of their names"""
    packing: Defining[Literal["stream", "whole"]] = "stream"
    """rows: cut from one stream of documents, or packed with whole documents (best fit), which leaves some padding"""
    mix_shards: Defining[int] = 0
    """shards whose rows are shuffled together before the next: for stores larger than the cache; 0: all"""
    cache: Free[str] = ""
    """folder for what is fetched from stores; empty: the user's cache"""
    cache_bytes: Free[int] = 100_000_000_000
    """largest size of that folder: the least recently used files are removed first"""
    verify: Free[bool] = True
    """verify each shard's checksum when it is first read on this machine; sizes are always checked"""
    seed: Defining[int] = 0
    """seed of the held-out split and of the sample order"""
    workers: Free[int] = 0
    """loader processes per rank; 0: a thread of the training process prefetches"""

    def __post_init__(self) -> None:
        if not self.source.strip() and not self.path:
            raise refuse(self, "data", "source", "a file, a folder or stdlib")
        at_least(self, "data", 256, "vocab")
        at_least(self, "data", 0, "seed", "workers", "held_out", "mix_shards")
        at_least(self, "data", 1, "cache_bytes")
        if not self.held_out < 1:
            raise refuse(self, "data", "held_out", "below 1")
        if self.blend and (self.path or self.source != type(self).source):
            other = f"data.path={self.path}" if self.path else f"data.source={self.source}"
            raise BadRecipe(f"data.blend and {other} exclude each other; make it one of the blend, or leave it out")
        if self.blend:
            shares(self.blend)
        if self.paths and len(self.paths) != len(self.blend):
            raise refuse(self, "data", "paths", f"one folder for each source of data.blend ({len(self.blend)})", "")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """Length and speed of training."""

    sequence: Defining[int] = 1024
    """tokens per sequence"""
    batch_tokens: Defining[int] = 65_536
    """tokens per step, over all ranks and micro-batches"""
    steps: Noted[int] = 1000
    """optimizer steps"""
    until: Free[str] = ""
    """stop early, once val_loss (or loss) has fallen to a value: val_loss=3.2; empty: after the last step"""
    from_scratch: Defining[bool] = False
    """random weights in the shape of a model that has trained ones"""
    lr: Noted[float | None] = None
    """peak learning rate; none: 3e-4·(7e9/N)^⅓, N the parameters, at most 3e-3 (through Llama 7B, 65B and 405B);
    adapters 2e-4"""
    lr_base_batch: Noted[int | None] = None
    """tokens of the batch that lr is meant for: the rate is multiplied by batch_tokens over it; none: used as it is"""
    min_lr: Noted[float | None] = None
    """learning rate at the end, multiplied like lr where lr_base_batch is given; none: a tenth of the peak"""
    warmup_steps: Noted[int | None] = None
    """steps of linear warm-up; none: a tenth of the steps, at most 2000"""
    schedule: Noted[Literal["cosine", "linear", "wsd", "constant"]] = "cosine"
    """decay of the learning rate after the warm-up; wsd stays at the peak and then decays"""
    decay_fraction: Noted[float] = 0.2
    """wsd: share of the steps in which the rate decays"""
    weight_decay: Noted[float] = 0.1
    """of AdamW, on matrices only"""
    betas: Noted[tuple[float, float]] = (0.9, 0.95)
    """of AdamW, for the averages of gradients and of their squares"""
    eps: Noted[float] = 1e-8
    """of AdamW, added to the root"""
    clip: Noted[float] = 1.0
    """largest gradient norm; 0: no clipping"""
    on_nonfinite: Free[Literal["stop", "skip"]] = "stop"
    """what happens when loss or gradients are nan or infinite: the step is never taken; stop ends the run, skip
    continues with the next batch (fp16 always skips, and lowers its loss scale)"""
    grace_s: Free[float] = 0.0
    """seconds from SIGTERM to the end of the process, as a scheduler grants them (Kubernetes 30, spot machines 30 to
    120): a step that takes longer than a third of them is abandoned, and what was complete before it is saved. 0: the
    step is completed first, however long it takes"""
    max_restarts: Free[int] = 3
    """times that ranks which were killed, or lost each other, are started again from the newest checkpoint with no new
    one in between; 0: the run ends. torchrun and srun have restarts of their own"""
    on_spike: Noted[Literal["warn", "skip", "rewind", "stop"]] = "warn"
    """what happens when the loss of a batch is far above the last ones: warn names its samples; skip also leaves the
    weights as they were; rewind goes back to the newest checkpoint, too, and leaves the batch out; stop ends the run"""
    replica_check_every: Free[int] = 1000
    """steps between comparisons of the bits that ranks hold in common, which find a flipped bit; 0: none"""
    on_hang: Free[OnHang] = "wait"
    """what follows the verdict on a run that stands still: exit, restart from the newest checkpoint (under torchrun or
    srun: exit, and its own restarts follow), or wait, where the run goes on if it can"""
    timeouts: Free[Mapping[str, float]] = field(default_factory=dict)
    """seconds after which an exchange along an axis fails, by axis; the others are { tp = 300, cp = 300, ep = 300, dp =
    450, pp = 600 }: those that exchange most often notice a lost rank first"""
    exclude_stragglers: Free[bool] = False
    """with --nodes: when nodes meet again, after a failure or because one joins, the node of a rank that the others
    have been waiting for is left out, where fewer nodes are faster without it or another one waits to take its place"""
    seed: Defining[int] = 0
    """seed of the initial weights and of dropout"""
    eval_every: Free[int] = 50
    """steps between validations; 0: only at the end"""
    eval_batches: Free[int] = 8
    """batches per validation"""
    save_every: Free[int | None] = None
    """steps between checkpoints; 0: only at the end and when the run is stopped; none: about every ten minutes, and at
    least 50 times as long as a save takes"""
    adapt_interval: Free[bool] = False
    """where save_every is none: once the run has failed, checkpoints are √(2·δ·M) of training apart, δ what a save has
    cost it and M the time between its failures (Young–Daly)"""
    checkpoint_async: Free[bool] = True
    """write checkpoints while training continues, from a copy in host memory; false: training waits"""
    checkpoint_full_every: Free[int] = 1
    """of so many checkpoints one is full and the others are its compressed differences (deltas), as long as these save
    a tenth of the bytes; 1: all are full"""
    checkpoint_url: Free[str] = ""
    """store that checkpoints are uploaded to and resumed from, as s3://bucket/folder, or another URL of fsspec; empty:
    they are in the run's folder only"""
    peer_copy_every: Free[int] = 0
    """steps between copies of the state in the memory of this and another machine, from which a run resumes after a
    crash; 0: none"""
    keep: Free[int] = 3
    """newest checkpoints that are kept; 0: all"""
    keep_every: Free[int] = 0
    """checkpoints of every so many steps are kept as well; 0: none"""
    keep_best: Free[int] = 0
    """as many checkpoints with the lowest val_loss are kept as well"""
    milestones: Free[Mapping[str, int]] = field(default_factory=dict)
    """checkpoints by name that are written after these steps and kept: { half = 5000 }"""
    profile_every: Free[int] = 100
    """steps between short profiles that split a step into compute, communication and overhead, beside three of the
    first twelve; 0: none"""
    log_every: Free[int] = 1
    """steps between records in gauges.jsonl"""
    compile: Noted[bool | Literal["auto"]] = "auto"
    """compile the blocks with torch.compile; auto: on a CPU, where the plan predicts that it saves several times the
    cost of compiling"""
    deterministic: Noted[bool] = False
    """bit-equal results on the same machine; slower, and no kernel is autotuned"""
    loss_chunk: Noted[int | None] = None
    """tokens per chunk of the loss; none: about 64 MB of logits but at least 1024 tokens, 0: all at once"""
    lora_rank: Defining[int] = 0
    """rank of LoRA adapters beside frozen weights; 0: every weight is trained"""
    lora_alpha: Defining[float | None] = None
    """adapters are scaled by alpha / rank; none: twice the rank"""
    lora_on: Defining[tuple[str, ...]] = ("qkv", "out", "gate_up", "down")
    """projections with adapters: qkv (or q, k, v; with latent attention q_a, q_b, kv_a, kv_b), out, gate_up (or gate,
    up), down"""
    lora_dropout: Noted[float] = 0.0
    """dropout on the inputs of adapters"""
    balance_loss: Noted[float | None] = None
    """weight of the routers' balance loss, a mean over sequences and layers that is 1 where all experts are used
    equally; none: the model's own (model.moe.aux_loss)"""
    router_z_loss: Noted[float] = 0.0
    """weight of the mean square of log Σ exp of the routers' logits, which keeps them small; usual: 1e-3"""
    bias_rate: Noted[float] = 2e-3
    """largest change per step of an expert's selection bias, up where it is used too little, down where too much
    (models with model.moe.selection_bias)"""
    expert_capacity: Noted[float | None] = None
    """capacity of an expert per sequence, times the fair share; tokens beyond are dropped; none: none are dropped"""
    track: Free[tuple[Literal["tensorboard", "mlflow", "wandb"], ...]] = ()
    """further destinations of gauges: tensorboard, mlflow, wandb"""

    def __post_init__(self) -> None:
        at_least(self, "train", 1, "sequence", "batch_tokens", "steps", "lr_base_batch", "eval_batches", "log_every")
        at_least(self, "train", 1, "checkpoint_full_every")
        intervals = ("warmup_steps", "eval_every", "save_every", "profile_every", "replica_check_every", "loss_chunk")
        at_least(self, "train", 0, "keep", "keep_every", "keep_best", "peer_copy_every", "max_restarts", "grace_s")
        weights = ("weight_decay", "balance_loss", "router_z_loss", "bias_rate")
        at_least(self, "train", 0, *intervals, *weights, "min_lr", "clip", "seed", "lora_rank", "lora_dropout")
        above_zero(self, "train", "lr", "eps", "lora_alpha", "expert_capacity")
        above_zero(self, "train", "decay_fraction", most=1)
        for axis, seconds in self.timeouts.items():
            if axis not in AXIS_TIMEOUTS_S or not seconds > 0:
                known = ", ".join(AXIS_TIMEOUTS_S)
                raise BadRecipe(f"train.timeouts has {axis} = {seconds:g}; give seconds for one of {known}")
        for name, step in self.milestones.items():
            if step < 1:
                raise BadRecipe(f"train.milestones has {name} = {step}; give the number of steps after which it is")
        check_names(self.lora_on)
        if not self.lora_dropout < 1:
            raise refuse(self, "train", "lora_dropout", "below 1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise refuse(self, "train", "betas", "two numbers below 1", "0.9,0.95")
        if self.batch_tokens < self.sequence:
            raise refuse(self, "train", "batch_tokens", f"a sequence of {self.sequence} at least", self.sequence)
        if self.warmup > self.steps:
            raise refuse(self, "train", "warmup_steps", f"at most train.steps={self.steps}", self.steps // 10)
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise refuse(self, "train", "min_lr", f"at most train.lr={self.lr}")

    @property
    def axis_timeouts_s(self) -> dict[str, float]:
        return {**AXIS_TIMEOUTS_S, **self.timeouts}

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled; auto counts as not, until a plan has resolved it."""
        return self.compile is True

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
        """Factor of the batch size on the rate: k times the tokens, k times the rate (the linear scaling rule, Goyal et
        al., arXiv 1706.02677, section 2.1; its warm-up is ours)."""
        return self.batch_tokens / self.lr_base_batch if self.lr_base_batch else 1.0

    def final_lr(self, num_parameters: int) -> float:
        """Given, or a tenth of the peak (Hoffmann et al., Chinchilla, arXiv 2203.15556)."""
        return self.peak_lr(num_parameters) / 10 if self.min_lr is None else self.min_lr * self.lr_factor

    def check_rates(self, num_parameters: int) -> None:
        """Refuse a final rate above a derived peak: the rate would rise to the end."""
        peak = self.peak_lr(num_parameters) / self.lr_factor
        if self.min_lr is not None and self.min_lr > peak:
            raise refuse(self, "train", "min_lr", f"at most the peak learning rate of {peak:.3g}", f"{peak / 10:.2g}")

    @property
    def lora_scale(self) -> float:
        """Factor on the adapters' output: alpha / rank."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / max(1, self.lora_rank)

    def chunk_tokens(self, vocab: int) -> int:
        """Tokens per chunk of the loss; 0: all."""
        return max(1024, 64_000_000 // (4 * vocab)) if self.loss_chunk is None else self.loss_chunk
