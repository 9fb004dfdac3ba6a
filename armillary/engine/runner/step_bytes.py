"""Steps as bytes, for other ranks: a JSON header with sizes and small things, then arrays as they are in memory.

Nothing is pickled, so what a rank receives can only ever be a step.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field
from typing import Any

import numpy as np

from armillary.engine.request.pooling import Pooling
from armillary.engine.runner.step_input import Admitted, Extra, Ints, PooledTokens, PromptLogprobs, Shape, Step

Array = np.ndarray
_NUMBERS = {name: np.dtype(name) for name in ("int64", "float32", "float64")}
"""dtypes of what steps give"""
PREFIX = struct.Struct("<II")
"""bytes of the header, bytes of the arrays"""


@dataclass(kw_only=True)
class RankMessage:
    """What rank 0 tells the others: run a step, write a LoRA adapter into a slot, exchange KV blocks with another
    engine, or, with none of them, stop."""

    step: Step | None = None
    masks: dict[int, bytes] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    """with data-parallel attention: tokens of the step on each dp rank"""
    adapter: tuple[int, str] | None = None
    """slot and folder"""
    transfer: dict[str, Any] | None = None
    """an order of `engine/disaggregation`"""


def encode(message: RankMessage) -> bytes:
    header: dict[str, Any] = {}
    arrays: list[bytes] = []
    if message.step is not None:
        header["step"] = _step_header(message.step)
        header["masks"] = [[at, len(mask)] for at, mask in message.masks.items()]
        header["sizes"] = message.sizes
        arrays = [*_step_arrays(message.step), *message.masks.values()]
    if message.adapter is not None:
        header["adapter"] = message.adapter
    if message.transfer is not None:
        header["transfer"] = message.transfer
    text, data = json.dumps(header, separators=(",", ":")).encode(), b"".join(arrays)
    return PREFIX.pack(len(text), len(data)) + text + data


def decode(text: bytes | memoryview, data: bytes | memoryview) -> RankMessage:
    """Of a message's header and arrays."""
    header, at = json.loads(bytes(text)), _Reader(data)
    message = RankMessage()
    if "step" in header:
        message.step = _step(header["step"], at)
        message.masks = {where: at.take(size) for where, size in header["masks"]}
        message.sizes = tuple(header["sizes"])
    if "adapter" in header:
        slot, folder = header["adapter"]
        message.adapter = slot, folder
    message.transfer = header.get("transfer")
    return message


@dataclass(kw_only=True)
class StepReport:
    """What a step gave on a rank, as `executor.Launched` has it."""

    tokens: Array | None = None
    logprobs: Array | None = None
    pooled: Array | None = None
    prompts: list[Array] = field(default_factory=list)


def encode_report(report: StepReport) -> bytes:
    arrays = [report.tokens, report.logprobs, report.pooled, *report.prompts]
    header = [None if array is None else [array.dtype.name, array.shape] for array in arrays]
    text = json.dumps(header, separators=(",", ":")).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays if array is not None)
    return PREFIX.pack(len(text), len(data)) + text + data


def decode_report(text: bytes | memoryview, data: bytes | memoryview) -> StepReport:
    at = _Reader(data)
    tokens, logprobs, pooled, *prompts = [
        None if given is None else at.numbers(_NUMBERS[given[0]], *given[1]) for given in json.loads(bytes(text))
    ]
    known = [array for array in prompts if array is not None]
    return StepReport(tokens=tokens, logprobs=logprobs, pooled=pooled, prompts=known)


class _Reader:
    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        begin, self._at = self._at, self._at + size
        return bytes(self._data[begin : self._at])

    def ints(self, *shape: int) -> Ints:
        return self.numbers(np.dtype(np.int32), *shape)

    def numbers(self, dtype: Any, *shape: int) -> Array:
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(self.take(size), dtype=dtype).reshape(shape).copy()


def _step_header(step: Step) -> dict[str, Any]:
    return {
        "shape": astuple(step.shape),
        "passes": [astuple(shape) for shape, _ in step.passes],
        "sizes": [len(step.ints), step.table_updates.shape[1], step.copies.shape[1]],
        "known": None if step.known is None else step.known.shape[1],
        "drafts": None if step.drafts is None else step.drafts.shape[1],
        "admitted": [[new.row, len(new.tokens), new.floats, new.ints, new.adapter] for new in step.admitted],
        "extras": [asdict(extra) for extra in step.extras],
        "prompts": [asdict(wanted) for wanted in step.prompts],
        "pooled": [asdict(pooled) for pooled in step.pooled],
        "draws": step.draws,
        "is_empty": step.is_empty,
    }


def _step_arrays(step: Step) -> Iterator[bytes]:
    """In the order in which `_step` takes them."""
    for array in (step.ints, step.table_updates, step.copies, step.known, step.drafts):
        if array is not None:
            yield np.ascontiguousarray(array, dtype=np.int32).tobytes()
    for new in step.admitted:
        yield new.tokens
    for _, ints in step.passes:
        yield np.ascontiguousarray(ints, dtype=np.int32).tobytes()


def _step(header: dict[str, Any], at: _Reader) -> Step:
    size, updates, copies = header["sizes"]
    ints, table_updates, block_copies = at.ints(size), at.ints(2, updates), at.ints(2, copies)
    known, drafts = (None if header[name] is None else at.ints(3, header[name]) for name in ("known", "drafts"))
    admitted = [
        Admitted(row=row, tokens=at.take(count), floats=tuple(floats), ints=tuple(numbers), adapter=adapter)
        for row, count, floats, numbers, adapter in header["admitted"]
    ]
    shapes = [Shape(*sizes) for sizes in header["passes"]]
    return Step(
        shape=Shape(*header["shape"]),
        ints=ints,
        table_updates=table_updates,
        copies=block_copies,
        known=known,
        drafts=drafts,
        admitted=admitted,
        extras=[_extra(extra) for extra in header["extras"]],
        prompts=[PromptLogprobs(**{**each, "targets": tuple(each["targets"])}) for each in header["prompts"]],
        pooled=[PooledTokens(**{**each, "pooling": _pooling(each["pooling"])}) for each in header["pooled"]],
        draws=header["draws"],
        is_empty=header["is_empty"],
        passes=[(shape, at.ints(shape.size)) for shape in shapes],
    )


def _extra(given: dict[str, Any]) -> Extra:
    bias = tuple((token, value) for token, value in given["bias"])
    return Extra(**{**given, "bias": bias, "banned": tuple(given["banned"])})


def _pooling(given: dict[str, Any]) -> Pooling:
    return Pooling(mode=given["mode"], token_ids=tuple(given["token_ids"]))
