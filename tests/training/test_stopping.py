"""Signals as a request to stop."""

from __future__ import annotations

import os
import signal

import pytest

from armillary.training.stopping import StopRequest


def test_sigterm_asks_however_often_it_comes_and_ctrl_c_ends_at_the_second() -> None:
    with StopRequest() as stop:
        assert not stop.asked()
        for _ in range(2):  # by the scheduler and by torchrun
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.1)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.asked()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0.1)
