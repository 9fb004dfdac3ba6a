"""The lifecycle of a run between its steps: resume, validate, save, end."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from armillary.errors import ArmillaryError
from armillary.parallel.consensus import Consensus
from armillary.parallel.host_memory import Event
from armillary.store.atomic import sweep_folder
from armillary.store.goodput import account_of
from armillary.store.run_events import read_events
from armillary.store.runs import Run, Say
from armillary.training.checkpoint import checkpoint
from armillary.training.checkpoint.export import export, export_adapter
from armillary.training.checkpoint.interval import SaveClock
from armillary.training.checkpoint.peer_copies import PeerCopies
from armillary.training.checkpoint.retention import Policy
from armillary.training.checkpoint.save_in_flight import Saved
from armillary.training.checkpoint.saver import Saver
from armillary.training.checkpoint.staging import call_before_steps
from armillary.training.resilience.replica_check import check_replicas
from armillary.training.resilience.sigterm_grace import NoPreemption
from armillary.training.skipped_batches import SkippedBatches
from armillary.training.startup_probe import startup_costs
from armillary.training.step.host_adamw import HostAdamW
from armillary.training.step.numerics import seed
from armillary.training.step.optimizer_offload import widen
from armillary.training.step_batches import Due
from armillary.training.stopping import Until
from armillary.training.telemetry.run_clock import RunClock
from armillary.training.telemetry.step_telemetry import StepReport
from armillary.training.trainer import Trainer
from armillary.training.trainer_state import check_text, facts_of, restore_facts, tensors_of


@dataclass(frozen=True, kw_only=True)
class Trained:
    """How a run ended: `finished` is False when it was stopped before its last step. `export` is the Hugging Face
    folder of a finished run, `saved` the step of its last checkpoint, if there is one."""

    run: Run
    steps: int
    finished: bool
    loss: float
    val_loss: float | None
    export: Path | None
    resumed_at: int = 0
    saved: int | None = None


class RunLifecycle:
    """Resumes, validates, saves and ends a run."""

    def __init__(
        self,
        run: Run,
        trainer: Trainer,
        until: Until | None,
        *,
        allowed: Callable[[], None] | None = None,
        say: Say = lambda text: None,
        clock: RunClock | None = None,
    ) -> None:
        """`allowed()` raises where another process has taken the run over: nothing may be written then."""
        self.allowed, self.say = allowed or (lambda: None), say
        self.run, self.trainer, self.until, self.job = run, trainer, until, trainer.job
        self.loss, self.done, self.restarts = float("nan"), 0, 0
        self.saved = -1  # step of the last checkpoint on disk, or of the one being written
        self._checked = -1  # step after which replicas were last compared
        self.preemption = NoPreemption()
        self._startup: dict[str, float] = {}
        self._captured: dict[str, Any] = {}
        self.run_clock = clock or RunClock(run, writes=False)
        past = account_of(read_events(run.folder)) if trainer.job.adapt_interval and trainer.ranks.is_main else None
        self.clock = SaveClock(trainer.job, trainer.plan.predicted.get("step_s"), past=past)
        trainer.batches.save_due = self._due
        self._num_saves = 0
        self.peers = PeerCopies(run, trainer.ranks) if trainer.job.peer_copy_every else None
        self.saver = Saver(
            run,
            trainer.ranks,
            device=trainer.device,
            allowed=self.allowed,
            committed=self._prune,
            full_every=self.job.checkpoint_full_every,
            url=self.job.checkpoint_url,
            policy=Policy.of(self.job),
            peers=self.peers,
        )
        trainer.batches.check = self.saver.check
        call_before_steps(trainer.optimizer, self.saver.before_update)
        trainer.spikes.samples = SkippedBatches(run, trainer).note
        self._rewinds: Counter[int] = Counter()  # by checkpoint

    def resume(self, step: int) -> int:
        """Restore everything from the checkpoint of `step`; 0: there is none."""
        if self.trainer.ranks.is_main:
            sweep_folder(self.run.folder / "checkpoints")
        if not step:
            return 0
        trainer, folder = self.trainer, checkpoint.place_of(self.run, step)
        trainer.telemetry.progress.mark("resume")
        trainer.telemetry.progress.step = step - 1
        about = trainer.ranks.run_on_all(lambda: checkpoint.read_facts(folder))
        trainer.ranks.run_on_all(lambda: check_text(trainer.plan, about, run=self.run.name))
        checkpoint.load(folder, tensors_of(trainer), trainer.ranks, trainer.mesh.machines)
        if isinstance(trainer.optimizer, HostAdamW):
            trainer.optimizer.upload_weights()
        if about["ranks"] != trainer.ranks.size:
            seed(self.job.seed, trainer.ranks.rank, step)
        restore_facts(trainer, about)
        self.loss = float(about["loss"])
        self.done, self.saved = step, trainer.ranks.broadcast(self._last_on_disk(step))
        self.restarts, self._checked = int(about["restarts_total"]) + 1, -1
        return step

    def _last_on_disk(self, step: int) -> int:
        """The last checkpoint up to `step`, which itself may be a copy in memory only; -1: there is none."""
        return max((number for number in self.run.checkpoint_steps() if number <= step), default=-1)

    def rewind(self, step: int) -> int:
        """After a spike in the last of `step` steps: back to the newest checkpoint, and on without that batch; each
        time that the same checkpoint is used, without twice as many. Without a checkpoint the batch was skipped."""
        trainer, restarts, left_out = self.trainer, self.restarts, set(self.trainer.batches.left_out)
        self.saver.finish()
        saved = checkpoint.newest(self.run, trainer.ranks)
        if not 0 < saved < step:
            return step
        bad, skipped = trainer.batches.data_step(step - 1), trainer.spikes.skipped
        self.resume(saved)
        self.restarts, trainer.spikes.skipped = restarts, skipped
        trainer.batches.leave_out({*left_out, *range(bad, bad + 2 ** self._rewinds[saved])})
        self._rewinds[saved] += 1
        return saved

    def probe(self, step: int) -> None:
        """Measure startup costs before the first step, which reports them; with a GPU, pin memory for checkpoints
        meanwhile."""
        if self.trainer.device.type == "cuda":
            self.saver.prepare(tensors_of(self.trainer))
        self._startup = startup_costs(self.trainer, step) | self.trainer.sharded.mesh.group_machines()

    def after(self, report: StepReport, step: int) -> tuple[StepReport, bool]:
        """The report with what was validated and saved, and whether the run is done; `step` steps are."""
        job, trainer = self.job, self.trainer
        self.run_clock.stepped(step, report.gauges)
        self.loss, self.done = report.gauges["loss"], step
        more = self._startup | ({"restarts_total": float(self.restarts)} if self.restarts else {})
        more |= self.run_clock.take_past()
        self._startup = {}
        if step == job.steps or (job.eval_every and step % job.eval_every == 0):
            with self.run_clock.during("validation", step), self.preemption.after_step(step):
                value = trainer.validate()
            more |= {"val_loss": value, "validation_s": trainer.validation_s} if value is not None else {}
        done = step == job.steps or (self.until is not None and self.until.is_met(report.gauges | more))
        if job.replica_check_every and step % job.replica_check_every == 0:
            self._check_replicas(step, tensors_of(trainer), trainer.ranks)
        if done or report.save:
            more |= self.save(step, wait=done)
        else:
            if report.copy:
                self.saver.save(step, tensors_of(trainer), self._facts(), in_memory=True)
            more |= self._save_gauges()
        more["goodput_fraction"] = self.run_clock.goodput_fraction
        return replace(report, gauges=report.gauges | more), done

    def note(self, *error: object) -> None:
        """Where the run fails, how far it had come; best effort, as the disk may be full."""
        if error[1] is not None and self.done and self.trainer.ranks.is_main:
            with suppress(ArmillaryError, OSError):
                self.run.update(step=self.done, loss=self.loss)

    def save(self, step: int, *, wait: bool = False) -> dict[str, float]:
        """Begin a checkpoint, or with `wait` (or where the recipe says so) write it. Gauges of saves that are committed
        by then are returned."""
        with self.run_clock.during("saving", step):
            return self._save(step, wait=wait)

    def save_abandoned(self, step: int, random: dict[str, Tensor], ranks: Consensus, ready: Event = None) -> None:
        """Save what was complete before step number `step`, which is abandoned, and on the device by the event `ready`;
        called by another thread than that of the steps, with `ranks` that share no process group with it."""
        if step == self.saved:
            ranks.run_on_all(self.saver.wait)
        elif step:
            self.saver.hand_over(ranks)
            with self.saver.stream.on(ready):
                self._check_replicas(step, self._captured, ranks)
            self.saver.save(step, self._captured, self._facts(), random=random, ready=ready)
            self.saver.finish()
            self.saved = step
        if self.peers is not None:
            self.peers.clear()
        if ranks.is_main:
            self.run.update(state="interrupted", step=step, loss=self.loss)
        self.run_clock.enter("stopped", step)

    def capture(self) -> None:
        """Note the tensors, for a step that is abandoned: within a step the model may hold gathered ones instead."""
        self._captured = tensors_of(self.trainer)

    def ended(self, first: int, step: int, *, finished: bool = False, export: Path | None = None) -> Trained:
        """A run that has ended after `step` steps, all of which are saved."""
        return Trained(
            run=self.run,
            steps=step,
            finished=finished,
            loss=self.loss,
            val_loss=self.trainer.val_loss,
            export=export,
            resumed_at=first,
            saved=self.saved if self.saved >= 0 else None,
        )

    def _check_replicas(self, step: int, tensors: Mapping[str, Any], ranks: Consensus) -> None:
        """Before each checkpoint on disk, too, so that none has what a flipped bit made of the state."""
        if not self.job.replica_check_every or step == self._checked:
            return
        try:
            check_replicas(tensors, ranks, step, saved=self.saved)
        except ArmillaryError:
            if self.peers is not None:
                self.peers.clear()  # copies in memory are not compared
            raise
        self._checked = step

    def _save(self, step: int, *, wait: bool) -> dict[str, float]:
        begin, tensors = time.perf_counter(), tensors_of(self.trainer)
        self.trainer.telemetry.progress.mark("save")
        self._check_replicas(step, tensors, self.trainer.ranks)
        self.saver.save(step, tensors, self._facts())
        self.saved = step
        if wait or not self.job.checkpoint_async:
            self.saver.finish()
        seconds = time.perf_counter() - begin
        self.clock.saved(seconds)
        self.trainer.telemetry.exclude(seconds)
        return self._save_gauges(seconds if wait or not self.job.checkpoint_async else None)

    def _save_gauges(self, stall_s: float | None = None) -> dict[str, float]:
        """Of what was committed since this was last called; `stall_s`: training waited so long for the last of them."""
        self._say_notes()
        done = self.saver.take_saved()
        if not done:
            return {}
        last, self._num_saves = done[-1], self._num_saves + len(done)
        self.clock.committed(last.seconds)
        stalls = [each.stall_s for each in done[:-1]] + [last.stall_s if stall_s is None else stall_s]
        return {
            "checkpoint_s": last.seconds,
            "checkpoint_stall_s": sum(stalls),
            "checkpoint_wait_s": sum(each.wait_s for each in done),
            "checkpoint_bytes": float(last.bytes),
            "checkpoints_total": float(self._num_saves),
        } | ({"checkpoint_delta_saved_fraction": last.saved_fraction} if last.delta_of is not None else {})

    def _due(self, step: int) -> Due:
        """On the main rank: what follows a step, a checkpoint or a copy in memory."""
        if self.clock.is_due(step):
            return "checkpoint"
        interval = self.job.peer_copy_every
        return "copy" if interval and (step + 1) % interval == 0 and self.saver.may_copy else ""

    def _say_notes(self) -> None:
        for text in self.saver.take_notes():
            self.say(text)

    def _prune(self, saved: Saved) -> None:
        checkpoint.prune(self.run, Policy.of(self.job), saved.step, busy=self.saver.busy)

    def close(self, *error: object) -> None:
        """End what writes checkpoints; a run that failed completes the one in flight, where it can."""
        self.saver.close(failed=error[1] is not None, at_once=isinstance(error[1], KeyboardInterrupt))

    def end(self, first: int, step: int, *, finished: bool) -> Trained:
        """A stopped run is saved to be resumed; a finished one is exported."""
        self._finish_saves(step)
        folder = self._export(step) if finished else None
        if self.trainer.ranks.is_main:
            self.run.update(state="finished" if finished else "interrupted", step=step, loss=self.loss)
        self.run_clock.enter("finished" if finished else "stopped", step)
        return self.ended(first, step, finished=finished, export=folder)

    def _finish_saves(self, step: int) -> None:
        """Save what is not on disk yet, and wait until all is where it belongs."""
        self.trainer.telemetry.progress.mark("save")
        if self.trainer.ranks.store_is_gone():
            self._replace_store(step)
        if step > max(self.saved, 0):
            self.save(step, wait=True)
        with self.run_clock.during("saving", step):
            self.saver.finish()
            self.saver.finish_uploads()
        self._say_notes()
        if self.peers is not None:
            self.peers.clear()

    def _replace_store(self, step: int) -> None:
        """The store that ranks meet in has ended with the launcher: what is saved last goes through another one."""
        ranks = self.trainer.ranks
        self.saver.close(failed=True)
        self.saved = ranks.broadcast(self._last_on_disk(step))  # what was being written was lost
        met = ranks.with_new_store()
        self.saver = Saver(self.run, met, device=self.trainer.device, allowed=self.allowed, committed=self._prune)

    def _export(self, step: int) -> Path:
        trainer, ranks, job = self.trainer, self.trainer.ranks, self.job
        self.run_clock.enter("exporting", step)
        trainer.telemetry.progress.mark("export")
        trainer.close()
        widen(trainer.model, trainer.optimizer)
        folder = export(trainer.sharded, job, self.run.export(step), ranks, tokenizer=trainer.text.tokenizer_folder)
        if job.lora_rank:
            base = trainer.plan.weights or trainer.plan.model.name
            export_adapter(trainer.sharded, job, self.run.folder / "adapter" / str(step), ranks, base=base)
        return folder

    def _facts(self) -> dict[str, Any]:
        return facts_of(self.trainer, loss=self.loss, restarts=self.restarts)
