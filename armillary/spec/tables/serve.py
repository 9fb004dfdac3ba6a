"""Servers in a recipe: the tables [serve] and [predict].

Few settings with good defaults; what is left out is derived by the rule in its docstring.
"""

from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadRecipe
from armillary.spec.lora import GROUPS
from armillary.spec.tables.checks import above_zero, at_least, refuse

MEMORY_FRACTION = {"gpu": 0.9, "cpu": 0.7}
"""default of serve.memory_fraction: vLLM's for GPUs; a CPU's memory is shared with other processes"""


@dataclass(frozen=True, kw_only=True)
class Serve:
    """Settings of the engine."""

    max_model_len: int | None = None
    """most tokens of prompt and completion together; none: the model's context, or what the KV cache holds if less"""
    kv_bytes: int | None = None
    """size of the KV cache per device; none: what memory_fraction leaves beside weights and working memory"""
    kv_host_bytes: int = 0
    """host memory per device for KV blocks that the prefix cache evicts, also those of preempted requests; they are
    loaded again where that is measured to be cheaper than recomputation; 0: they are lost"""
    memory_fraction: float | None = None
    """share of a device's memory for weights, working memory and KV cache together; none: 0.9 of a GPU, 0.7 of what a
    process on a CPU may use"""
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "fp8", "int8"] = "auto"
    """dtype of the KV cache; auto: that of the activations"""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """dtype of loaded weights and of compute; auto: 16 bits (the stored dtype, else bf16) where prefill and decode are
    measured to be at least 1.15 × as fast as in fp32, else fp32"""
    weights: Literal["auto", "int8", "fp8", "2:4"] = "auto"
    """dtype of the layers' weights; auto: as loaded; int8 (CPU) and fp8 (GPU) are quantised when they are loaded; 2:4
    (GPU): weights with two zeros in every four inputs are compressed"""
    threads: int | None = None
    """compute threads on a CPU; none: one per core, in a server one fewer where decode steps spend more time in torch
    calls than in arithmetic: the server's own process and clients on the machine need a core"""
    pp: int = 1
    """pipeline stages of layers, each on --tp devices; as many steps, of different requests, are in flight, so that
    throughput grows with the stages and the latency of a request does not fall; max_running is of all together"""
    ep: int = 1
    """parts of the experts: as many groups of a stage's devices have whole experts of their own, instead of a part of
    every expert; it divides --tp, or --tp × dp_attention"""
    dp_attention: int = 1
    """copies of attention, each on --tp devices, with a KV cache and requests of its own (data-parallel attention), for
    models with experts, which are divided over all copies' devices: n times as many tokens are cached where tp would
    replicate the cache, as that of latent attention; max_running and max_tokens_per_step are of each copy"""
    block_tokens: int = 16
    """tokens per KV block"""
    max_tokens_per_step: int = 2048
    """token budget of an engine step: decodes first, prefill chunks fill the rest"""
    max_running: int = 256
    """largest decode batch"""
    speculate: Literal["none", "ngram", "draft", "mtp"] = "none"
    """speculative decoding: tokens drafted by prompt lookup (ngram), by the model of serve.draft, or by the model's own
    layer for multi-token prediction or trained draft head (mtp) are verified together; the output stays the same, token
    by token. draft is the default where serve.draft is given"""
    draft: str = ""
    """small model with the same tokenizer that drafts tokens: a folder, a run or a release"""
    max_draft: int = 8
    """most draft tokens of a request per step; how many are drafted follows acceptance and load, down to none"""
    adapters: str = ""
    """folder of LoRA adapters, one in each subfolder, which are loaded at the start under the subfolders' names"""
    max_adapters: int = 0
    """most LoRA adapters in memory at once; 0: none, or 8 where serve.adapters is given"""
    adapter_rank: int = 16
    """largest rank of a LoRA adapter: memory is kept for max_adapters of this rank on the projections of adapter_on"""
    adapter_on: tuple[str, ...] = tuple(GROUPS)
    """projections that LoRA adapters may be on: qkv, out, gate_up, down; those left out cost neither memory nor time"""
    nodes: str = ""
    """server: N@HOST:PORT shares the ranks of one engine among N nodes, which meet at an address of the first; start
    the same command on each; what passes is neither encrypted nor authenticated, so a private network is needed"""
    node_rank: int | None = None
    """server: which of serve.nodes this is; none: as Slurm, Kubernetes or torchrun say"""
    role: Literal["combined", "prefill", "decode"] = "combined"
    """server: part in disaggregated serving; prefill: compute prompts for decode servers, which connect to
    serve.prefill; decode: let the server there compute long prompts, and receive their KV blocks"""
    prefill: str = ""
    """server: HOST:PORT on which a prefill server takes decode servers' connections, and to which a decode server
    connects; further ranks of the prefill server use the ports after it; what passes is neither encrypted nor
    authenticated, so a private network is needed"""
    prefill_min_tokens: int = 128
    """decode server: prompts with fewer tokens that its prefix cache does not have are computed there"""
    prefill_ahead_bytes: int = 256_000_000
    """prefill server: most bytes of KV blocks that are on their way to one decode server; further prompts of it wait,
    but one is always computed"""
    batching: Literal["none", "static", "dynamic", "continuous"] = "continuous"
    """batching policy; all but continuous are for comparison"""
    prefix_cache: bool = True
    """keep the KV blocks of finished prompts for prompts with the same prefix"""
    prefill_tokens: int | None = None
    """most prompt tokens per step while other requests decode, to keep their inter-token latency even; none: what the
    step budget leaves"""
    prefill_slowdown: float | None = None
    """most times that prompts may stretch a step over its decodes alone, learnt from earlier steps; none: 2.0 where
    outputs are streamed (a server, LLM.stream) and no more requests wait for their first token than for their next, no
    limit otherwise; none and prefill_tokens set: only prefill_tokens limits"""
    max_waiting: int | None = None
    """most requests in the queue; more are rejected at once; none: no limit"""
    max_wait_s: float | None = None
    """time after which a request that has not started is dropped; none: it waits, in a server 600 s"""
    ageing_s: float = 60.0
    """waiting time that outweighs one level of priority, so that no request starves; 0: first come, first served, and a
    server rejects requests with a priority"""
    batch_window_s: float = 0.05
    """dynamic batching: how long the first request of a batch waits for others"""
    overlap: bool = True
    """schedule the next step while one runs (GPU only)"""
    graphs: bool = True
    """run steps as CUDA graphs, captured when the engine starts (GPU only)"""
    check_every: int = 0
    """steps between checks of every invariant of scheduler and cache; 0: never"""
    max_answer: int | None = None
    """server: most tokens of a completion; none: what the model's length leaves"""
    max_body_bytes: int = 4_000_000
    """server: largest request body"""
    timeout_s: float | None = None
    """server: time after which a request is aborted, however far it is; none: never"""
    drain_s: float = 30.0
    """server: time on SIGTERM that running requests have to finish"""
    frozen_s: float = 5.0
    """server: silence after which an engine is not ready, also where a step takes this long and 4 times its expected
    time; an engine sends a heartbeat twice per second during a step"""
    hung_s: float | None = 120.0
    """server: silence after which an engine is restarted, also where a step takes this long and 20 times its expected
    time; none: never"""
    name: str = ""
    """server: the clients' name of the model; empty: its own name"""
    api_key_file: str = ""
    """server: file with one API key per line; empty: no key is needed"""
    tools: Literal["auto", "hermes", "llama3", "mistral", "qwen3_coder", "deepseek"] = "auto"
    """server: format of tool calls; auto: that of the chat template"""
    reasoning: Literal["auto", "none", "think", "harmony"] = "auto"
    """server: format of a model's reasoning, which chats return as reasoning_content: think tags, or gpt-oss' harmony;
    auto: that of the chat template; none: it stays in the text"""
    pooling: Literal["auto", "none", "last", "mean", "cls"] = "auto"
    """server: hidden states that embeddings are made of; auto: as the model's modules.json and 1_Pooling say, else the
    last token's; none: no embeddings"""
    scoring: Literal["auto", "embedding", "yes_no"] = "auto"
    """server: how /v1/rerank and /v1/score compare texts: by the cosine of their embeddings, or by the probability that
    the model says yes to both, as Qwen3-Reranker does; auto: yes_no where the model's name has "rerank" and it has no
    modules.json"""
    emulate: bool = False
    """server: compute nothing, and let every step take the time that the planner predicts on hardware.on: a test
    of a gateway, of clients or of an autoscaler with real processes and HTTP but without the devices, whose text means
    nothing"""
    runtime_adapters: bool = False
    """server: clients may load and unload LoRA adapters (/v1/load_lora_adapter), from any folder that the server can
    read: for trusted clients only"""
    generation_config: Literal["auto", "none"] = "auto"
    """sampling parameters that a request leaves out; auto: from the model's generation_config.json; none: neutral
    ones"""
    trust_request_chat_template: bool = False
    """server: requests may have their own chat template; Jinja's sandbox isolates it, but does not limit its time and
    memory"""
    registry_poll_s: float = 5.0
    """server of registry:NAME@ALIAS: seconds between two looks at the alias; 0: the version at the start stays"""
    trusted_keys: str = ""
    """file of Ed25519 public keys, one per line; a release is loaded only where one of them signed it; empty: any"""
    metrics: Literal["armillary", "vllm"] = "armillary"
    """server: names on /metrics; vllm: vLLM's beside ours, for dashboards and autoscalers made for it"""
    access_log: str = ""
    """server: file for one JSON line per request, without text and keys; empty: none"""
    cors_origins: tuple[str, ...] = ()
    """server: origins of browser pages that may call it; * for all"""
    root_path: str = ""
    """server: path that a proxy adds before /v1"""
    tls_certificate: str = ""
    """server: PEM file of a certificate with its chain: serve HTTPS; empty: HTTP"""
    tls_key: str = ""
    """server: PEM file of the certificate's key"""
    otlp: str = ""
    """server: OpenTelemetry collector for a trace of every request; empty: none"""

    @property
    def has_draft_model(self) -> bool:
        """Whether draft tokens are computed: by another model, or by a head on this one's hidden states."""
        return self.speculate in ("draft", "mtp")

    def decides_ahead(self, device: str) -> bool:
        """Whether the next step is scheduled while one runs on a device of this kind: on a CPU a step is over when its
        launch returns."""
        return self.overlap and device != "cpu"

    def __post_init__(self) -> None:
        sizes = ("max_model_len", "kv_bytes", "block_tokens", "max_tokens_per_step", "max_running", "prefill_tokens")
        at_least(self, "serve", 1, *sizes, "threads", "max_answer", "max_body_bytes", "max_draft")
        at_least(self, "serve", 1, "pp", "ep", "dp_attention")
        if self.draft and self.speculate == "none":
            object.__setattr__(self, "speculate", "draft")
        at_least(self, "serve", 0, "max_adapters", "kv_host_bytes")
        if self.kv_host_bytes and not self.prefix_cache:
            raise BadRecipe("serve.kv_host_bytes keeps blocks of the prefix cache; leave serve.prefix_cache=true")
        at_least(self, "serve", 1, "adapter_rank", "prefill_min_tokens", "prefill_ahead_bytes")
        self._check_role()
        self._check_dp_attention()
        if not self.adapter_on or not set(self.adapter_on) <= set(GROUPS):
            raise refuse(self, "serve", "adapter_on", f"some of {', '.join(GROUPS)}", "qkv,out")
        if self.adapters and not self.max_adapters:
            object.__setattr__(self, "max_adapters", 8)
        if self.speculate == "draft" and not self.draft:
            raise BadRecipe("serve.speculate=draft needs a model that drafts; name it with serve.draft")
        if self.speculate in ("ngram", "mtp") and self.draft:
            raise BadRecipe(
                f"serve.draft is for serve.speculate=draft, and {self.speculate} needs no other model; leave one out"
            )
        at_least(
            self, "serve", 0, "max_waiting", "ageing_s", "batch_window_s", "check_every", "drain_s", "registry_poll_s"
        )
        above_zero(self, "serve", "max_wait_s", "timeout_s", "frozen_s", "hung_s")
        above_zero(self, "serve", "memory_fraction", most=1)
        if self.prefill_slowdown is not None and not 1.0 < self.prefill_slowdown < float("inf"):
            raise refuse(self, "serve", "prefill_slowdown", "above 1: prompts take some time", 2.0)

    def _check_dp_attention(self) -> None:
        """BadRecipe for what data-parallel attention cannot be combined with."""
        if self.dp_attention == 1:
            return
        unable = {
            f"serve.pp={self.pp}": self.pp > 1,
            f"serve.speculate={self.speculate} (take ngram)": self.has_draft_model,
            f"serve.role={self.role}": self.role != "combined",
            f"serve.kv_host_bytes={self.kv_host_bytes}": self.kv_host_bytes > 0,
            f"serve.batching={self.batching}": self.batching != "continuous",
            "serve.emulate": self.emulate,
        }
        first = next((what for what, used in unable.items() if used), None)
        if first is not None:
            raise BadRecipe(f"serve.dp_attention={self.dp_attention} does not go with {first} yet; leave one out")

    def _check_role(self) -> None:
        """BadRecipe for what disaggregated prefill and decode cannot be combined with."""
        if self.role == "combined":
            if self.prefill:
                raise BadRecipe("serve.prefill is for serve.role=prefill or decode; set one of them, or leave it out")
            return
        if not self.prefill:
            raise BadRecipe(f"serve.role={self.role} needs serve.prefill=HOST:PORT, the prefill server's address")
        if not self.prefix_cache:
            raise BadRecipe(f"serve.role={self.role} exchanges blocks of the prefix cache; set serve.prefix_cache=true")
        if self.pp > 1 and self.role == "decode":
            raise BadRecipe("serve.role=decode takes blocks with all layers; leave serve.pp 1, use --tp")
        if self.emulate:
            raise BadRecipe(f"serve.role={self.role} needs an engine that computes; leave serve.emulate=false")

    def ranks(self, tp: int) -> int:
        """Ranks of one engine with so much tensor parallelism."""
        return tp * self.pp * self.dp_attention


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Batching of the predict server; the defaults suit one model on one machine."""

    max_batch: int = 32
    """most rows per batch; 1: no batching"""
    max_delay_s: float = 0.0
    """how long the first row of a batch waits for others while the model is idle; 0: not at all; rows that arrive while
    it runs are batched in any case"""
    preferred: tuple[int, ...] = ()
    """batch sizes that run as soon as they are complete, and to which a larger batch is reduced"""
    max_queue: int = 4096
    """most waiting rows; more are rejected with 429"""
    timeout_s: float = 30.0
    """time after which a request without a response gets 504"""
    max_body_bytes: int = 16_000_000
    """larger requests are rejected with 413"""
    threads: int | None = None
    """threads of the model; none: one per core that this process may use"""
    device: str = "cpu"
    """where the model runs: cpu, cuda, cuda:1 …"""
    compile: bool = False
    """compile .pt2 models with torch.compile when they are loaded"""
    reload_s: float = 1.0
    """seconds between checks for a new version; 0: never"""
    grace_s: float = 30.0
    """time that running requests have to finish when the server is stopped"""

    def __post_init__(self) -> None:
        at_least(self, "predict", 1, "max_batch", "max_queue", "max_body_bytes", "threads")
        at_least(self, "predict", 0, "max_delay_s", "reload_s", "grace_s")
        above_zero(self, "predict", "timeout_s")
        if not all(1 <= size <= self.max_batch for size in self.preferred):
            raise refuse(self, "predict", "preferred", f"from 1 to predict.max_batch={self.max_batch}", better="[]")
