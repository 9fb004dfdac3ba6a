"""Steps and requests as records for gauges.jsonl, under the names of `spec/gauges.py`, and the log that writes them.

The log of an engine that may run for months: every request is recorded, and every k-th step, with k such that about 50
steps per second are. Each record is complete, so step times can be fitted to any sample of them. Old records are cut
off, and no step waits for a disk.
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from armillary.engine.request.sequence import Sequence
from armillary.engine.scheduler.decision import Decision
from armillary.engine.scheduler.scheduler import Scheduler
from armillary.errors import ArmillaryError
from armillary.store.gauges import GaugeWriter


def step_gauges(scheduler: Scheduler, decision: Decision, left: int = 0) -> dict[str, float]:
    """State after a step was scheduled, its work, and totals so far; `left` sequences ran in it and have ended
    since."""
    running = {"running": len(scheduler.request_table.running) + left}
    return state_gauges(scheduler) | decision.work._asdict() | running | _adapter_gauges(scheduler, decision)


def state_gauges(scheduler: Scheduler) -> dict[str, float]:
    """Running and waiting sequences, KV cache usage, and totals so far."""
    totals, caches = scheduler.totals, scheduler.caches
    return {
        "running": len(scheduler.request_table.running),
        "waiting": scheduler.request_table.num_waiting,
        "kv_used_fraction": sum(cache.used_fraction for cache in caches) / len(caches),
        "kv_capacity_tokens": sum(cache.capacity_tokens for cache in caches),
        "preemptions_total": totals.preempted,
        "recomputed_total": totals.recomputed,
        "prefix_queries_total": totals.looked_up,
        "prefix_hits_total": totals.hits,
        "prefix_hit_fraction": totals.hits / totals.looked_up if totals.looked_up else 0.0,
        "prefix_repeated_total": totals.repeated,
        "prefix_evicted_total": totals.misses["evicted"],
        "requests_total": totals.finished,
        "aborted_total": totals.aborted,
        "rejected_total": totals.rejected,
        "errors_total": totals.errors,
        "tokens_in_total": totals.tokens_in,
        "tokens_out_total": totals.tokens_out,
    } | (_dp_gauges(scheduler) | _speculation_gauges(scheduler) | _offload_gauges(scheduler))


def _dp_gauges(scheduler: Scheduler) -> dict[str, float]:
    """How evenly requests are divided over dp ranks; none without data-parallel attention."""
    if len(scheduler.caches) == 1:
        return {}
    counts = Counter(seq.dp_rank for seq in scheduler.request_table.running)
    return {
        "dp_ranks": len(scheduler.caches),
        "dp_running_max": max(counts.values(), default=0),
        "dp_kv_used_max_fraction": max(cache.used_fraction for cache in scheduler.caches),
    }


def _adapter_gauges(scheduler: Scheduler, decision: Decision) -> dict[str, float]:
    """LoRA adapters of a step; none where none is loaded."""
    if not scheduler.request_table.adapters:
        return {}
    sequences = [*decision.decodes, *(chunk.sequence for chunk in decision.chunks)]
    names = [seq.request.adapter for seq in sequences if seq.request.adapter]
    return {"adapters": len(set(names)), "adapter_rows": len(names)}


def _speculation_gauges(scheduler: Scheduler) -> dict[str, float]:
    """Draft tokens so far; none without speculation."""
    totals = scheduler.totals
    if scheduler.speculation is None:
        return {}
    return {
        "drafted_total": totals.drafted,
        "accepted_total": totals.accepted,
        "acceptance_fraction": totals.accepted / totals.drafted if totals.drafted else 0.0,
        "speculation_speedup": totals.plain_s / totals.speculated_s if totals.speculated_s else 1.0,
    }


def _offload_gauges(scheduler: Scheduler) -> dict[str, float]:
    """KV blocks in host memory; none where there is none for them."""
    cache = scheduler.cache
    offload = cache.offload
    if offload is None:
        return {}
    return {
        "kv_host_capacity_tokens": offload.num_blocks // len(cache.groups) * cache.block_tokens,
        "kv_host_used_fraction": offload.used_fraction,
        "kv_offloaded_total": offload.num_offloaded,
        "kv_loaded_total": offload.num_loaded,
        "kv_swapped_in_total": offload.swapped_in,
        "kv_load_declined_total": offload.declined,
    }


def request_gauges(seq: Sequence) -> dict[str, float]:
    """Times and sizes of a finished sequence; phases that it never reached are left out."""
    gauges: dict[str, float] = {
        "tokens_in": seq.num_prompt,
        "tokens_out": seq.num_output,
        "cached_tokens": seq.cached_tokens,
        "tokens_limit": seq.limit - seq.num_prompt,
        "arrived_s": seq.arrived_at,
        "request_number": seq.number,
    }
    if seq.request.params.temperature:
        gauges["temperature"] = seq.request.params.temperature
    if seq.shared_prefix:
        gauges |= {"repeated_tokens": seq.shared_prefix, "prefix_source_request": seq.prefix_source}
    end = seq.finished_at
    if end is not None:
        gauges["e2e_s"] = end - seq.arrived_at
    if seq.started_at is not None:
        gauges["queue_s"] = seq.started_at - seq.arrived_at
    if seq.first_token_at is not None and seq.started_at is not None:
        gauges["ttft_s"] = seq.first_token_at - seq.arrived_at
        gauges["prefill_s"] = seq.first_token_at - seq.started_at
        if end is not None:
            gauges["decode_s"] = end - seq.first_token_at
            if seq.num_output > 1:
                gauges["tpot_s"] = (end - seq.first_token_at) / (seq.num_output - 1)
                gauges["itl_max_s"] = seq.largest_gap_s
    return gauges


_PER_SECOND = 50
_ALL = 200  # first steps, which are all recorded: a short run is recorded completely
_MOST_BYTES = 24_000_000  # size of the file beyond which the older half is cut off
_MOST_WAITING = 10_000  # records that wait to be written; where the disk is slower, later ones are dropped


class GaugeLog:
    """`GaugeLog(writer).record` for an engine; `close` writes what is left."""

    def __init__(
        self, writer: GaugeWriter, *, per_second: float = _PER_SECOND, first: int = _ALL, most_bytes: int = _MOST_BYTES
    ) -> None:
        self._writer, self._most_bytes = writer, most_bytes
        self._per_second, self._first = per_second, first
        self._queue: queue.Queue[tuple[Mapping[str, Any], int | None, str | None, float] | None] = queue.Queue(
            _MOST_WAITING
        )
        self.step_interval = 1  # one in so many steps is recorded
        self._lasting: list[Mapping[str, Any]] = []
        """records of neither a step nor a request: written again when old ones are cut off"""
        self._seen = self._unrecorded = 0
        self._counted, self._since = 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def record(self, gauges: Mapping[str, Any], *, step: int | None = None, request: str | None = None) -> None:
        """Called in the engine's thread; never blocks."""
        if step is not None:
            self._unrecorded += 1
            if not self._takes():
                return
            gauges, self._unrecorded = {**gauges, "recorded_steps": self._unrecorded}, 0
        try:
            self._queue.put_nowait((gauges, step, request, time.time()))
        except queue.Full:
            return

    def _takes(self) -> bool:
        """Whether this step is recorded; the rate is adapted about once a second."""
        self._seen += 1
        self._counted += 1
        now = time.monotonic()
        if now - self._since >= 1.0:
            wanted = self._counted / (now - self._since) / self._per_second
            self.step_interval = max(1, round(wanted))
            self._counted, self._since = 0, now
        return self._seen <= self._first or not self._seen % self.step_interval

    def close(self) -> None:
        """Write what waits, and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._writer.close()

    def _run(self) -> None:
        while (entry := self._queue.get()) is not None:
            gauges, step, request, now = entry
            if step is None and request is None:
                self._lasting.append(gauges)
            try:
                self._writer.write(gauges, step=step, request=request, now=now)
                for lasting in self._lasting if self._writer.keep_last(self._most_bytes) else ():
                    self._writer.write(lasting)
            except ArmillaryError:  # a full disk does not stop the engine; later records may fit
                continue
