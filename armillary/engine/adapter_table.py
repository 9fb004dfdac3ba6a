"""The LoRA adapters of an engine: which are loaded, in which slots, and when a slot is free again.

All methods but `read` are called between steps, in the engine's thread. A name stands for the same adapter for the life
of the engine, since the prefix cache is keyed by it: an adapter that is loaded again gets another one.
"""

from collections.abc import Callable
from pathlib import Path

from armillary.engine.scheduler.request_table import RequestTable
from armillary.errors import BadInput
from armillary.model.weights.adapter_folder import Adapter, read_adapter
from armillary.spec.model import ModelConfig
from armillary.spec.tables.serve import Serve

Install = Callable[[int, Adapter], None]  # (slot, adapter): write it, on every rank


class AdapterTable:
    """Names of adapters and their slots."""

    def __init__(
        self, config: ModelConfig, request_table: RequestTable, install: Install, *, slots: int, serve: Serve
    ) -> None:
        self._config, self._serve = config, serve
        self._requests = request_table
        self._install = install
        self._slots: dict[str, int] = {}  # of adapters that are loaded, or unloaded and still used by requests
        self._free = list(range(slots - 1, -1, -1))
        self._num_slots = slots
        self._used: set[str] = set()  # names that were ever given

    def read(self, folder: Path | str) -> Adapter:
        """Read and check a folder; any thread may do it."""
        if not self._num_slots:
            raise BadInput("this engine takes no adapters; start it with --set serve.max_adapters=8")
        return read_adapter(folder, self._config, max_rank=self._serve.adapter_rank, on=self._serve.adapter_on)

    def add(self, name: str, adapter: Adapter) -> None:
        """Load an adapter that was read; BadInput where there is no free slot."""
        assert name and name not in self._used, "names of adapters are used once"
        self._collect()
        if not self._free:
            waiting = len(self._slots) - len(self._requests.adapters)
            raise BadInput(
                f"{len(self._requests.adapters)} adapters are loaded and {waiting} are unloaded but still in use, of "
                f"{self._num_slots} at once; unload one or raise serve.max_adapters"
            )
        self._install(self._free[-1], adapter)
        self._slots[name] = self._free.pop()
        self._used.add(name)
        self._requests.adapters.add(name)

    def remove(self, name: str) -> None:
        """No new request may use it; its slot is free once those in the engine have ended."""
        self._requests.adapters.discard(name)

    def slot_of(self, name: str) -> int:
        return self._slots[name]

    def _collect(self) -> None:
        """Free the slots of unloaded adapters that no request uses any more."""
        used = {sequences[0].request.adapter for sequences in self._requests.requests.values()}
        for name in [name for name in self._slots if name not in self._requests.adapters and name not in used]:
            self._free.append(self._slots.pop(name))
