"""The training loop: step, validate, save, write down; stop when asked, and end with a checkpoint and an export.

Every rank runs it; the main rank writes. However it ends, the run can resume from the last complete checkpoint.
"""

import secrets
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.parallel.world import World, join_world, new_group
from armillary.spec.plan import Plan
from armillary.store.hang_verdict import resolve_verdict
from armillary.store.home import Home
from armillary.store.lease import HeldLease, LeaseLost
from armillary.store.runs import Run, Say
from armillary.training.checkpoint import checkpoint
from armillary.training.checkpoint.peer_copies import sweep_memory
from armillary.training.checkpoint.staging import call_before_steps
from armillary.training.gauge_log import Recorder, Watch, note_failure
from armillary.training.resilience.rank_heartbeat import BEAT_S, HeartbeatSender
from armillary.training.resilience.sigterm_grace import NoPreemption, Preemption, UpdateGate
from armillary.training.resilience.watcher import watched
from armillary.training.run_lifecycle import RunLifecycle, Trained
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.numerics import numerics, seed
from armillary.training.stopping import StopRequest, Until
from armillary.training.telemetry.run_clock import RunClock
from armillary.training.trainer import Trainer
from armillary.units import bytes_text


def train(
    plan: Plan,
    run: Run,
    *,
    device: str | None = None,
    until: Until | None = None,
    watch: Watch | None = None,
    say: Say = lambda text: None,
    home: Home | None = None,
    parent: int = 0,
    leaving: Callable[[Trained], None] = lambda done: None,
) -> Trained:
    """Train what the plan says, from the run's last checkpoint where it has one. Called by every rank; `watch` sees the
    main rank's reports and `say` its lines, `home` remembers which kernels were quickest, and `parent` is the launcher
    whose end ends the run. `leaving` is told how a run ended whose process ends at once (`train.grace_s`)."""
    with join_world(device) as world:
        try:
            with run.renewing_lease() if world.is_main else nullcontext() as lease:
                run = replace(run, owner=lease.owner) if lease is not None else run
                clock = RunClock(run, writes=world.is_main)
                clock.enter("loading")
                how: dict[str, Any] = {"until": until, "watch": watch, "say": say, "home": home, "parent": parent}
                how["leaving"] = leaving
                return _train(plan, run, world, lease, clock, **how)
        except LeaseLost:
            raise  # what is noted in the folder is another process's
        except torch.OutOfMemoryError as error:
            line = out_of_memory(plan, world)
            note_failure(run, line)
            raise line from error
        except BaseException as error:
            if world.is_main:
                note_failure(run, error)
            raise


def _train(
    plan: Plan,
    run: Run,
    world: World,
    lease: HeldLease | None,
    clock: RunClock,
    *,
    until: Until | None,
    watch: Watch | None,
    say: Say,
    home: Home | None,
    parent: int,
    leaving: Callable[[Trained], None],
) -> Trained:
    job, ranks = plan.train, make_consensus(world)
    assert job is not None, "a plan for training"
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(parent, (lambda: lease.lost) if lease is not None else None))
        heartbeats = stack.enter_context(watched(plan, run, world, say, by_launcher=bool(parent)))
        stack.enter_context(numerics(tf32=plan.layout.precision == "tf32", deterministic=job.deterministic))
        if world.local_rank == 0:
            sweep_memory()
        saved = checkpoint.newest(run, ranks, say, url=job.checkpoint_url, copies=job.peer_copy_every > 0)
        kernels = ranks.run_on_all(lambda: checkpoint.kernels_of(run, saved))
        trainer = stack.enter_context(Trainer(plan, world, ranks, kernels=kernels, home=home, folder=run.folder))
        trainer.telemetry.progress, trainer.spikes.said = heartbeats.progress, say
        if until is not None:
            until.check(job, held_out=bool(trainer.text.validation.parts))
        seed(job.seed, world.rank)
        allowed = lease.check if lease is not None else None
        lifecycle = RunLifecycle(run, trainer, until, allowed=allowed, say=say, clock=clock)
        stack.push(lifecycle.close)
        first = lifecycle.resume(saved)
        stack.push(lifecycle.note)
        lifecycle.probe(first)
        record = stack.enter_context(Recorder(run, trainer, watch=watch, say=say, start=first))
        lifecycle.preemption = stack.enter_context(_preemption(lifecycle, first, leaving, heartbeats))
        if world.is_main:
            resolve_verdict(run.folder)  # of an earlier start
        clock.enter("steps", first)
        return _run_steps(lifecycle, record, stop, first)


def _run_steps(lifecycle: RunLifecycle, record: Recorder, stop: StopRequest, first: int) -> Trained:
    trainer, preemption = lifecycle.trainer, lifecycle.preemption
    step, done = first, first >= trainer.job.steps
    while not done:
        report = None
        try:
            with preemption.step(step):
                report = trainer.step(step, stop=stop.asked, meanwhile=record.write)
            if report is None:
                trainer.ranks.run_on_all(lifecycle.allowed)  # a run that another process has taken over is not saved
                break
            step += 1
            report, done = lifecycle.after(report, step)
        except Exception:
            if not preemption.was_abandoned():
                raise
            if report is not None:  # what followed the step was abandoned
                record(report, last=True)
            return lifecycle.ended(first, step)
        record(report, last=done)
        if trainer.spikes.rewinds and not done:
            step = lifecycle.rewind(step)
            record.rewind(step)
    record.write()
    return lifecycle.end(first, step, finished=done)


def _preemption(
    lifecycle: RunLifecycle, first: int, leaving: Callable[[Trained], None], heartbeats: HeartbeatSender
) -> NoPreemption:
    """What answers SIGTERM within `train.grace_s`. An optimizer on the host changes its states beside the steps, so its
    steps are always completed."""
    trainer, ranks = lifecycle.trainer, lifecycle.trainer.ranks
    if not trainer.job.grace_s or isinstance(trainer.optimizer, HostAdamW):
        return NoPreemption()
    own = _with_own_group(ranks)
    gate = UpdateGate(trainer.device)
    call_before_steps(trainer.optimizer, gate.before_update)
    lifecycle.capture()

    def before_exit() -> None:
        heartbeats.end(wait_s=BEAT_S)
        if own.is_main:
            leaving(lifecycle.ended(first, lifecycle.done))

    return Preemption(
        own,
        gate,
        grace_s=trainer.job.grace_s,
        save=lambda step, random: lifecycle.save_abandoned(step, random, own, gate.ready),
        before_exit=before_exit,
        say=lifecycle.say,
        token=ranks.broadcast(secrets.token_hex(8)),
    )


def _with_own_group(ranks: Consensus) -> Consensus:
    """The same ranks with a process group of their own, for another thread."""
    group = new_group(backend="gloo") if ranks.size > 1 else None
    return Consensus(rank=ranks.rank, size=ranks.size, group=group)


def make_consensus(world: World) -> Consensus:
    """Over gloo, which exchanges CPU tensors, whatever backend the devices use."""
    group = new_group(backend="gloo") if world.size > 1 and world.device.type == "cuda" else None
    return Consensus(rank=world.rank, size=world.size, group=group)


def out_of_memory(plan: Plan, world: World) -> ArmillaryError:
    """What was planned, what was in use, and what to try when the device is out of memory."""
    layout = plan.layout
    most = 2 if layout.splits_backward else 3
    less = f"layout.micro_batch={layout.micro_batch // 2}" if layout.micro_batch > 1 else f"layout.zero={most}"
    change = "layout.recompute=full" if layout.recompute != "full" else less
    planned = plan.predicted.get("memory_peak_bytes")
    used = [f"planned {bytes_text(planned)}"] if planned else []
    if world.device.type == "cuda":
        used += [f"at most {bytes_text(torch.cuda.max_memory_allocated(world.device))} in tensors"]
        used += [f"{bytes_text(torch.cuda.memory_reserved(world.device))} taken from the device"]
    where = f"rank {world.rank} ({world.device})" + "".join(f", {each}" for each in used)
    return ArmillaryError(f"out of memory on {where}; try --set {change}")
