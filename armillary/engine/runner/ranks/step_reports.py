"""What a step gave on another rank, sent to rank 0: tokens, log-probabilities, vectors.

With pipeline stages the last one samples; with data-parallel attention every copy does, for its own requests.
"""

import queue
import threading
from typing import cast

import torch
from torch import Tensor

from armillary.engine.runner.executor import Launched
from armillary.engine.runner.step_bytes import Array, StepReport
from armillary.engine.runner.step_channel import StepReceiver
from armillary.engine.runner.step_input import Step
from armillary.engine.scheduler.decision import Decision


def launched_elsewhere(decision: Decision, step: Step, report: StepReport) -> Launched:
    """A step of another rank, as if it had run here."""
    return Launched(
        decision=decision,
        step=step,
        tokens_B=_tensor(report.tokens),
        logprobs=_tensor(report.logprobs),
        pooled=_tensor(report.pooled),
        prompts=[torch.from_numpy(array) for array in report.prompts],
    )


def _tensor(array: Array | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)


class StepReports:
    """Sends what steps gave to rank 0, from a thread: the next step is launched while the device still runs."""

    error: Exception | None = None

    def __init__(self, channel: StepReceiver) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def put(self, launched: Launched) -> None:
        self._queue.put(launched)

    def close(self) -> None:
        """Send what is left."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (launched := self._queue.get()) is not None:
            try:
                if launched.done is not None:
                    launched.done.synchronize()
                self._channel.send_report(_report(launched))
            except OSError:  # rank 0 has ended, as the other thread notices
                return
            except Exception as error:  # rank 0 waits for the report, and the other thread for a step
                self.error = error
                self._channel.shut_down()
                return


def _report(launched: Launched) -> StepReport:
    tokens, logprobs, pooled = (
        None if tensor is None else cast(Array, tensor.numpy())
        for tensor in (launched.tokens_B, launched.logprobs, launched.pooled)
    )
    prompts = [tensor.numpy() for tensor in launched.prompts]
    return StepReport(tokens=tokens, logprobs=logprobs, pooled=pooled, prompts=prompts)
