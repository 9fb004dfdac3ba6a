"""How many weights the optimisers step: torch leaves the shapes of lists beyond thirty tensors out of its traces.

Sizes are read once an optimiser, from a hook that torch calls before every step.
"""

from typing import Any

from torch.compiler import is_compiling
from torch.optim import optimizer as optimizers

_NAMES = {"torch.bfloat16": "c10::BFloat16", "torch.float16": "c10::Half", "torch.float64": "double"}


class OptimizerSizes:
    """Between `start` and `stop`, every optimiser that takes a step is measured."""

    def __init__(self) -> None:
        self._seen: dict[int, list[dict[str, Any]]] = {}
        self._handle: Any = None

    def start(self) -> None:
        self._handle = optimizers.register_optimizer_step_pre_hook(self._see)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _see(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():  # Dynamo then finds nothing here
            self.see(optimizer)

    def see(self, optimizer: Any) -> None:
        """Measure one; also for those whose steps are followed without our hook."""
        if id(optimizer) not in self._seen:
            self._seen[id(optimizer)] = _lists(optimizer)

    @property
    def lists(self) -> list[dict[str, Any]]:
        """[{"weights": …, "dtype": …}]: one for each list of tensors a step goes over."""
        return [entry for entries in self._seen.values() for entry in entries]


def _lists(optimizer: Any) -> list[dict[str, Any]]:
    """torch steps the tensors of a group together, those of one device and dtype."""
    counts: dict[tuple[int, str, str], int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if tensor.grad is not None:
                key = (number, str(tensor.device), str(tensor.dtype))
                counts[key] = counts.get(key, 0) + tensor.numel()
    return [{"weights": count, "dtype": _NAMES.get(dtype, "float")} for (_, _, dtype), count in counts.items()]
