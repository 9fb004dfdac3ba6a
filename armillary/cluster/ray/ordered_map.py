"""A function over many parts as tasks of a Ray cluster, with results in the order of the parts.

Few more tasks than cores are in flight, so that neither the cluster's object store nor this process holds the whole
result. A task whose node is lost is run again by Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from armillary.cluster.ray.connection import connect
from armillary.errors import ArmillaryError

AHEAD = 2
"""tasks per worker that are in flight or wait to be taken"""
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
"""a task has one core, and its tokenizer uses no more"""


class RayMap:
    """Maps like the built-in, on all cores of the cluster."""

    def __init__(self, address: str = "") -> None:
        self._ray = connect(address, environment=ONE_THREAD)
        self._workers = max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def __call__(self, function: Callable[[Any], Any], parts: Iterable[Any]) -> Iterator[Any]:
        ray, shared = self._ray, self._ray.put(function)  # what the function holds, like a tokenizer, travels once
        task = ray.remote(_call).options(num_cpus=1, max_retries=3)
        waiting: deque[Any] = deque()
        for part in parts:
            waiting.append(task.remote(shared, part))
            if len(waiting) >= AHEAD * self._workers:
                yield self._take(waiting)
        while waiting:
            yield self._take(waiting)

    def _take(self, waiting: deque[Any]) -> Any:
        try:
            return self._ray.get(waiting.popleft())
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ArmillaryError):
                raise error.cause from None
            raise


def _call(function: Callable[[Any], Any], part: Any) -> Any:
    return function(part)
