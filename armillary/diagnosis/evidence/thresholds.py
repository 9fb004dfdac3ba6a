"""The decision thresholds of the diagnosis in one table: value, meaning, date, and what each was set on.

`date` is the day on which the value entered the code. Most values are judgements from the day the rules were written
(2026-11-15). The planted problems (benchmarks/planted) were written in the same commits and have been run after every
change since, so "judgement" does not mean that a value never saw them; a value that was chosen to make certain runs
come out right names these runs. Which recordings are for tuning and which for judging is in tests/planted/sets.py.
Limits of reading, such as warm-up steps and bytes per file, are beside the readers.
"""

from typing import Self

JUDGEMENT = "judgement"
PLANTED = "planted problems, live on two CPU cores, size 1, seed 0"
PLANTED_SIZES = "246 live planted runs on two CPU cores, sizes 0.5 to 2, severities 0.5 to 2, seeds 0 to 2"
PAGES = "synthetic vLLM pages (tests/diagnosis/data/make_vllm_pages.py)"
REAL_PAGES = "vLLM pages recorded on an RTX 4090 (tests/diagnosis/data/rtx4090)"


class _Noted:
    """A number that knows its meaning, the day it was set and what it was set on."""

    meaning: str
    date: str
    set_on: str

    def __new__(cls, value: float, meaning: str = "", set_on: str = JUDGEMENT, date: str = "2026-11-15") -> Self:
        number = super().__new__(cls, value)  # type: ignore[call-arg]
        number.meaning, number.set_on, number.date = meaning, set_on, date
        return number


class Threshold(_Noted, float):
    """A share, a factor or seconds."""


class Count(_Noted, int):
    """A whole number."""


# --- the verdict

MIN_SPEEDUP = Threshold(
    1.05, "predicted speed-up from which a lever, and so its cause, is worth naming; repeated runs differ by less"
)
NAME_WITHOUT_LEVER_SHARE = Threshold(
    0.25, "share of the time from which a cause is named although no lever is known", PLANTED + ", healthy runs"
)
MIN_TIMED = Count(4, "timed steps or requests before a run is called healthy")
BASELINE_SPEEDUP_GPU = Threshold(
    1.3,
    "predicted speed-up from which kernels that merely are the time limit a training run on a GPU",
    "recordings gpu-healthy and gpu-short-kernels",
    "2026-11-16",
)
BASELINE_SPEEDUP_CPU = Threshold(
    1.4,
    "the same on a CPU, which runs operator by operator, so that compiling always gains something",
    PLANTED + ": healthy-rank, healthy-ranks",
    "2026-11-16",
)
BUDGET_SUM_TOLERANCE = Threshold(
    0.2, "distance from 1 up to which recorded shares of a step are one budget; each is a median over several steps"
)

# --- parts of a training step

MAX_LAUNCH_SHARE = Threshold(0.95, "most of a step that counts as launch overhead; some of it is always work")
MAX_REMOVABLE_SHARE = Threshold(0.95, "share of the time beyond which no gain is promised: the trace is not of steps")
WINSORISE_ABOVE = Threshold(0.9, "quantile to which higher values of a series are lowered before the mean is taken")
SAME_SLOWEST_RANK_SHARE = Threshold(
    0.65,
    "share of the steps in which the slowest rank is the same one; chance gives 1 / ranks",
    PLANTED + ": slow-rank, few-micro-batches, healthy-ranks",
)
MIN_SPREAD_STEPS = Count(
    5, "steps with rank times; chance makes one of two ranks slowest in 4 of 4 steps once in eight runs"
)
STRAGGLER_STANDARD_ERRORS = Threshold(
    2.5,
    "standard errors of the median by which a rank must be late; chance exceeds it once in a hundred runs",
    PLANTED + ": slow-rank, few-micro-batches, healthy-ranks",
)
STRAGGLER_RUN_PARTS = Count(
    4,
    "consecutive parts of the run in each of which the rank must be late; neighbouring steps are not independent",
    PLANTED_SIZES + ": healthy-ranks",
    "2026-11-16",
)
STRAGGLER_PART_SHARE = Threshold(
    0.25,
    "share of its median lateness that the rank must show in each of these parts",
    PLANTED_SIZES + ": healthy-ranks",
    "2026-11-16",
)

# --- rules: one device

DATA_WAIT_SHARE = Threshold(0.04, "share of the time spent waiting for batches; a prefetching loader stays below")
LAUNCH_SHARE = Threshold(
    0.08, "share of launch gaps and of kernels too short for any roofline; operators of a fair size stay below"
)
HOST_STALL_SHARE = Threshold(
    0.08, "share in which Python alone held the device up; logging and the learning rate take a tenth of it"
)
SYNC_SHARE = Threshold(
    0.06,
    "share of synchronisation from which late launches are caused by it: the host cannot run ahead of the device",
    "recordings gpu-sync, gpu-short-kernels, gpu-healthy",
)
BUSY_SHARE = Threshold(0.5, "share of kernels in a step from which the kernels are what the time is")
TRACE_LAUNCH_SHARE = Threshold(0.2, "share of the device's time lost between launches in another program's trace")
WIDE_GEMM_SHARE = Threshold(0.1, "share of the time in 32-bit GEMMs from which 16 bits are worth it")

# --- rules: many devices

EXPOSED_COMM_SHARE = Threshold(0.08, "share of the time in exposed communication from which another layout is priced")
BUBBLE_SHARE = Threshold(0.08, "share of pipeline idle time that a few more micro-batches would not bring below")
STRAGGLER_SHARE = Threshold(
    0.1, "share of a step by which one rank is later than the others; equal machines differ by less", PLANTED
)
STAGE_SPREAD_SHARE = Threshold(
    0.3, "the same of pipeline stages, relative to a stage's own work, which FLOPs predict only roughly"
)
ROUTER_SKEW = Threshold(
    0.5, "distance of the busiest expert's load from even (0) towards all tokens on the fewest experts (1)"
)
UNUSED_EXPERT_SHARE = Threshold(0.25, "share of experts that hardly see a token")
COLLAPSED_ROUTER_SHARE = Threshold(
    0.4,
    "share given to a router that has collapsed completely, in proportion to a partial collapse",
    PLANTED_SIZES + ": expert-collapse beside other causes",
    "2026-11-16",
)
QUALITY_SHARE = Threshold(0.05, "share given to a cause that costs quality or safety rather than time")
STALL_SHARE = Threshold(0.04, "share of the time in checkpoints or validations; a few hundredths are usual")
FAILURE_SHARE = Threshold(
    0.05, "share of the time in repeated steps and restarts; a run saved at its best interval seldom loses more"
)
STALL_TARGET_SHARE = Threshold(0.01, "share of the time to which levers bring checkpoints and validations down")
MEMORY_FULL_SHARE = Threshold(
    0.95, "share of a device's memory beyond which the allocator has to search and a longer batch fails"
)
SKIPPED_STEP_SHARE = Threshold(
    0.02,
    "share of steps whose update is skipped; a loss scale that doubles every 2,000 steps skips 0.0005",
    date="2026-11-19",
)
DROPPED_TOKEN_SHARE = Threshold(0.05, "share of routed choices that are dropped", date="2026-11-19")
FRAGMENTED_SHARE = Threshold(
    0.15, "share of the reserved memory that is never used; caching allocators keep about a tenth", date="2026-11-19"
)
SCALING_LOSS_SHARE = Threshold(
    0.03, "share of the speed per device that a larger size must lose to be a boundary", date="2026-11-19"
)

# --- rules: other programs' logs

SPIKE_RATIO = Threshold(1.5, "ratio to the usual step from which a line is a spike; noise of shared machines is lower")
MIN_SPIKES = Count(3, "spikes that make a period")
SLOWDOWN_RATIO = Threshold(1.1, "ratio to the first steps from which a run has slowed down")
MIN_TREND_LINES = Count(9, "lines that make a trend")
MIN_TREND_S = Threshold(120.0, "seconds of a run below which heat and leaks cannot be told")
WELL_SET_GEMM_SHARE = Threshold(
    0.5,
    "share of the speed of the chip's largest GEMMs that well-set dense runs keep",
    "published runs in benchmarks/planning_accuracy.md: 35 to 50 % MFU where GEMMs reach 65 to 75 %",
)
RECOMPUTE_MEMORY_SHARE = Threshold(0.5, "share of a device's memory below which keeping activations is worth a try")

# --- rules: our own engine

QUEUE_SHARE = Threshold(
    0.1, "share of the time in steps, or of a request's time, below which a queue is the chance of arrivals"
)
OVERLOADED_QUEUE_SHARE = Threshold(
    0.25, "the same of both, from which a server cannot keep up; a well-used one has short queues now and then"
)
QUEUE_CLEARING_SHARE = Threshold(
    0.15, "share of the time in steps that must be saved before the queue counts as a cause's own"
)
MIN_SAVED_SHARE = Threshold(0.05, "share of the time below which a saving is not worth naming")
BATCH_JOB_SPAN_SHARE = Threshold(
    0.05, "share of the run's time within which all requests of a batch job arrive; its queue is its own"
)
BUDGET_SPENT_SHARE = Threshold(
    0.5, "share of a step's prompt budget from which it is spent: chunks end at blocks and query tiles"
)
KV_HELD_SHARE = Threshold(0.5, "share of the KV cache in use below which blocks cannot be what is lacking")
FIRST_RECORDED_STEP = Count(4, "step number up to which the first record is the beginning of the run")
PREEMPTIONS_PER_REQUEST = Threshold(0.1, "preemptions per request from which preemption is a cause")
RECOMPUTED_TOKEN_SHARE = Threshold(0.03, "share of all computed tokens that were recomputed after preemptions")
MISSED_PREFIX_SHARE = Threshold(0.1, "share of prompt tokens that came before and are computed again")
EVICTED_REQUEST_SHARE = Threshold(0.05, "share of requests that would have found more of their prefix a moment before")
ITL_STRETCH = Threshold(
    4.0, "ratio of the 99th percentile of inter-token latency to a step without prompts", PLANTED + ": no-chunks"
)
CHOSEN_ITL_STRETCH = Threshold(
    2.0, "times that ratio where the user chose the prompt budget of a step and set no objective"
)
NOTICEABLE_GAP_S = Threshold(0.02, "seconds between tokens; nobody reads or speaks faster than 50 tokens/s")
STRETCHED_TOKEN_SHARE = Threshold(0.01, "share of tokens in stretched steps: what the 99th percentile sees")
REPEATED_PREFILL_SHARE = Threshold(
    0.5,
    "share of computed prompt tokens that came before, from which long steps are caused by the prefix cache",
    PLANTED + ": no-prefix-cache, no-chunks",
)
GRAPHS_ROOFLINE_FRACTION = Threshold(
    0.35, "fraction of the roofline that steps reach once launches are hidden, even with one row"
)
HOST_BOUND_WAIT_SHARE = Threshold(
    0.5, "share of a step spent waiting for the device, below which the host is the limit"
)
SCHEDULE_SHARE = Threshold(0.15, "share of a step in which the device idles while the host schedules")
MIN_DRAFTED = Count(200, "draft tokens before acceptance is judged", date="2026-11-19")
SPECULATION_LOSS_SHARE = Threshold(0.05, "share of decode time that drafts must cost to be a cause", date="2026-11-19")

# --- rules: counters of devices

SLOW_CLOCK_SHARE = Threshold(
    0.12, "share of the highest clock that is missing; tensor cores at full power seldom reach it", date="2026-11-19"
)
HOT_SHARE = Threshold(0.2, "share of the time hot, or at the power limit, that explains a low clock", date="2026-11-19")
IDLE_DEVICE_SHARE = Threshold(0.15, "share of the time without a kernel", date="2026-11-19")

# --- rules: an autoscaler's decisions

OVERPROVISIONED_SHARE = Threshold(
    0.35,
    "share of the replica-hours that nothing needed; autoscaled days pay up to 0.26 for what is to come",
    "simulated days (benchmarks/simulator.md: cost 5 to 36 % above the oracle's)",
    "2026-11-19",
)
REPLICA_USED_SHARE = Threshold(
    0.5, "share of one replica below which a replica of half the devices would do", date="2026-11-19"
)
COLD_START_SHARE = Threshold(
    0.05, "share of the requests that come while their replicas start: five in the 99th percentile", date="2026-11-19"
)
AT_MOST_SHARE = Threshold(
    0.05, "share of the requests that come while the policy allows too few replicas", date="2026-11-19"
)

# --- rules: what a cluster says of a job

JOB_FAILURES = Count(2, "ends of attempts from which they are no accident", date="2026-11-19")

# --- rules: a gateway's page

ROUTING_SKEW_RATIO = Threshold(
    1.75,
    "requests of the busiest replica over the mean; prefix routing is meant to stay below 1.5",
    "benchmarks/gateway_prefix.py: 1.27 with shared prefixes",
    "2026-11-19",
)

# --- rules: a metrics page alone

PAGE_QUEUE_SHARE = Threshold(0.1, "share of a request's time in the queue below which requests hardly wait", PAGES)
TTFT_QUEUE_SHARE = Threshold(0.5, "share of the time to first token in the queue that is felt though outputs are long")
WAITING_PER_RUNNING = Threshold(0.5, "waiting requests per running one, beyond what arrives between two steps", PAGES)
KV_FULL_SHARE = Threshold(0.9, "share of the KV cache from which the next request does not fit", PAGES)
KV_SPARE_SHARE = Threshold(0.8, "share of the KV cache below which memory is not what keeps requests out", PAGES)
PAGE_PREEMPTIONS_PER_REQUEST = Threshold(0.03, "preemptions per request that a well-sized server stays below", PAGES)
ITL_P99_OVER_P50 = Threshold(
    4.0, "99th percentile of inter-token latency over the median; decode-only steps stay within 2", PAGES
)
PREFILL_GAP_SHARE = Threshold(0.1, "share of the engine's time in prefill below which prompts are rare", PAGES)
PREFILL_SHARE = Threshold(0.3, "share of the engine's time in prefill from which a prefix cache is worth a question")
PREFILL_DOMINATES_SHARE = Threshold(
    0.5, "share of the engine's time in prefill from which requests wait for other prompts"
)
ARRIVALS_OVER_FINISHED = Threshold(
    1.2, "requests that arrived per finished one, from which the queue has grown since the start", PAGES
)
SERVER_MEMORY_SHARE = Threshold(0.95, "share of a device's memory that a server can be given")
MIN_STEP_TOKENS = Count(
    64,
    "tokens of a step below which nothing is gained: weights are read for that many as fast as for one",
    REAL_PAGES,
    "2026-11-16",
)
PROMPT_BURST_RATIO = Threshold(
    2.0, "prompt tokens that must fit a step, per prompt token of a mean step", REAL_PAGES, "2026-11-16"
)
MAX_REPLICAS = Count(8, "replicas proposed at once")

# --- levers: training

WORKER_MARGIN = Threshold(1.25, "loader workers per worker that the step needs; workers are not equally fast")
MAX_WORKERS = Count(16, "loader workers advised where the number of cores is not known")
FUSION_TRAFFIC_RATIO = Threshold(
    2.0, "memory traffic before per after fusion of a memory-bound op: one read and one write less each"
)
GRADIENT_BUCKET_RATIO = Count(8, "gradient buckets per bucket now, so that more of the backward pass hides them")
LARGER_BATCH_SHARE = Threshold(
    0.2,
    "share of exposed communication from which a larger batch is offered: it changes the optimisation",
    PLANTED + ": slow-link",
)
MIN_FREED_SHARE = Threshold(0.06, "share of held memory that a change must free to help a full device")
BALANCED_EXPERT_LOAD = Threshold(1.3, "busiest expert's load over the mean that routers with a balance loss reach")
FILLABLE_MEMORY_SHARE = Threshold(0.92, "share of a device's memory that a change may fill")

# --- levers: serving

NEAR_BEST_SHARE = Threshold(0.97, "share of the best gain from which a smaller change is preferred")
GROWING_QUEUE_SHARE = Threshold(
    0.25,
    "share of a request's time in the queue, and of the run after the last arrival: the queue grows without end",
    PLANTED_SIZES + ": too-much-traffic, small-batch",
    "2026-11-16",
)
QUEUE_OWNER_SHARE = Threshold(
    0.5, "share of the gain of one more server that a lever must reach to own the queue", PLANTED + ": too-much-traffic"
)
AFTER_OWNER_SHARE = Threshold(
    0.95, "share of the queue that is left to more servers where another cause owns it: they come next"
)
GRAPH_HOST_S = Threshold(5e-4, "host seconds per step with CUDA graphs where not measured", "an H200's host: 0.5 ms")
GRAPH_REPLAY_S = Threshold(
    2e-4, "host seconds to encode a step and replay its graph", "an H200's host: 0.7 ms with 64 rows less scheduling"
)
USABLE_MEMORY_SHARE = Threshold(0.9, "share of a device's memory that weights and KV cache may take")
MIN_CHUNK_TOKENS = Count(16, "smallest prefill chunk that is tried")
SPARED_QUEUE_SHARE = Threshold(0.1, "share of a request's time in the queue that a lever need not remove")
MAX_TTFT_LOSS = Threshold(1.5, "factor by which smaller chunks may lengthen the median time to first token")
MAX_E2E_LOSS = Threshold(
    1.15, "factor by which smaller chunks may lengthen the mean request", PLANTED_SIZES + ": no-chunks", "2026-11-16"
)
MAX_THROUGHPUT_LOSS = Threshold(
    1.15, "factor by which smaller chunks may lower the throughput", PLANTED_SIZES + ": no-chunks", "2026-11-16"
)
UNNOTICED_TTFT_S = Threshold(0.1, "seconds to first token below which nobody loses", PLANTED_SIZES, "2026-11-16")

TABLE: dict[str, Threshold | Count] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Threshold | Count)
}
"""name -> threshold"""
