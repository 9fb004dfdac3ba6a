"""Capturing a CUDA graph that may fail: what can be known before, and how to leave nothing behind after.

When the end of a capture fails, torch leaves the capture's stream as the current one, and its memory pool as the place
where everything is allocated from then on, which nothing ever frees.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def waits_for_device(call: Callable[[], object]) -> str:
    """How a call waits for the device, which no capture allows; nothing if it does not."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it may not find everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        return (str(error).strip().splitlines() or ["it waits for the device"])[0]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return ""


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """torch.cuda.graph; if it fails, stream and pool are as they were before."""
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    except RuntimeError:
        torch.cuda.set_stream(stream)
        _let_go(stream.device, pool)
        raise


def _let_go(device: torch.device, pool: Any) -> None:
    """No more allocations in the pool of a capture that did not end; one that did gives it back by itself."""
    assert device.index is not None
    end, release = (getattr(torch._C, f"_cuda_{name}", None) for name in ("endAllocateToPool", "releasePool"))
    if end is None or release is None:  # a torch that keeps them elsewhere: memory stays taken, no more than that
        return
    try:
        end(device.index, pool)
    except RuntimeError:  # nothing is allocated there: the capture had ended
        return
    release(device.index, pool)
