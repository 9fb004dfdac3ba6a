"""Gluon kernels run on a CPU, which triton's interpreter does not do: what they compute, and in which order.

Every partition of a program is a thread. Copies arrive as late as they may (when somebody waits for their barrier, and
NaN stands there until then), MMAs and copies to global memory read their operands as late as they may (when they are
waited for), so that a missing wait or a buffer that is used too early shows as a wrong result. Layouts are ignored.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

ATOMIC = threading.Lock()
PATIENCE_S = 60.0
"""until a barrier that nobody completes counts as a deadlock"""
AT_ONCE = 16
"""programs that run at a time"""


class Block(torch.Tensor):
    """A tensor in registers."""

    def split(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.unbind(-1)


def block(x: Any, dtype: torch.dtype | None = None) -> Any:
    return torch.as_tensor(x, dtype=dtype).as_subclass(Block)


class Pointer:
    """Elements of a tensor's storage, by offset."""

    def __init__(self, x: torch.Tensor, at: Any = 0) -> None:
        self.data, self.at = torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0), at

    dtype = property(lambda self: SimpleNamespace(element_ty=self.data.dtype))

    @classmethod
    def to_start(cls, x: torch.Tensor) -> Pointer:
        return cls(x, x.storage_offset())

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)

    def __sub__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at - offset)

    def load(self, mask: Any = None, other: Any = 0) -> Any:
        at, keep = torch.broadcast_tensors(torch.as_tensor(self.at), torch.as_tensor(True if mask is None else mask))
        assert bool(((at >= 0) & (at < len(self.data)) | ~keep).all()), "a load out of bounds"
        found = self.data[torch.where(keep, at, 0)]
        return block(torch.where(keep, found, torch.as_tensor(other, dtype=found.dtype)))

    def store(self, value: Any, mask: Any = None) -> None:
        at, value, keep = torch.broadcast_tensors(
            torch.as_tensor(self.at), torch.as_tensor(value), torch.as_tensor(True if mask is None else mask)
        )
        assert bool(((at >= 0) & (at < len(self.data)) | ~keep).all()), "a store out of bounds"
        self.data[at[keep]] = value[keep].to(self.data.dtype)


class Shared:
    """A view of shared memory; fresh memory is NaN."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))
    type = property(lambda self: SimpleNamespace(shape=self.shape))

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.data), f"there is no buffer {int(i)} of {len(self.data)}"
        return Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Shared:
        assert self.data.is_contiguous() and dtype == self.dtype
        strides = [int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape))]
        return Shared(torch.as_strided(self.data, [int(n) for n in shape], strides, self.data.storage_offset()))

    def load(self, layout: object) -> Any:
        return block(self.data.clone())

    def store(self, value: Any) -> None:
        assert value.dtype == self.dtype
        self.data.copy_(torch.as_tensor(value).broadcast_to(self.data.shape))


class Barrier:
    """An mbarrier; `copies` are under way and arrive when somebody waits."""

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.copies: list[Callable[[], int]] = []

    def deliver(self) -> None:
        while self.copies:
            self.bytes -= self.copies.pop(0)()
        self.settle()

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier expects"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1


class Descriptor:
    """A tensor descriptor from the host."""

    def __init__(self, host: Any) -> None:
        self.host, self.dtype, self.layout = host, host.base.dtype, host.layout
        size = int(torch.tensor(host.block_shape).prod()) * host.base.element_size()
        self.block_type = SimpleNamespace(shape=list(host.block_shape), nbytes=size)

    def window(self, at: list[Any]) -> tuple[torch.Tensor, list[slice], list[slice]]:
        """The whole tensor, where of it the block lies, and which part of the block that is."""
        whole = torch.as_strided(self.host.base, self.host.shape, self.host.strides, self.host.base.storage_offset())
        sides = [
            (max(0, int(a)), max(0, min(int(a) + n, size)), int(a))
            for a, n, size in zip(at, self.host.block_shape, self.host.shape, strict=True)
        ]
        inside = [slice(low, max(low, high)) for low, high, _ in sides]
        return whole, inside, [slice(low - a, max(low, high) - a) for low, high, a in sides]


class Mma:
    """A product that is computed when it is waited for."""

    def __init__(self, a: Any, b: Shared, acc: Any, use_acc: bool) -> None:
        self.a, self.b, self.acc, self.use_acc, self.value = a, b, acc, use_acc, None

    def finish(self) -> None:
        left = (self.a.data if isinstance(self.a, Shared) else torch.as_tensor(self.a)).float()
        value = left @ self.b.data.float()
        before = self.acc.value if isinstance(self.acc, Mma) else self.acc
        self.value = block(value + before if self.use_acc else value)


class Program:
    """One program of a grid: its barriers and what its threads have under way."""

    def __init__(self, at: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self.at, self.grid = at, grid
        self.changed = threading.Condition()
        self.barriers: dict[int, Barrier] = {}
        self.own = threading.local()
        self.failed: list[BaseException] = []

    def barrier(self, x: Shared) -> Barrier:
        return self.barriers[x.data.data_ptr()]

    def _list(self, name: str) -> list[Any]:
        return self.own.__dict__.setdefault(name, [])

    # mbarrier

    def init(self, x: Shared, count: int) -> None:
        self.barriers[x.data.data_ptr()] = Barrier(int(count))

    def expect(self, x: Shared, size: int, pred: Any = True) -> None:
        self._change(x, 1, int(size), pred)

    def arrive(self, x: Shared, *, count: int = 1, pred: Any = True) -> None:
        self._change(x, int(count), 0, pred)

    def _change(self, x: Shared, count: int, size: int, pred: Any) -> None:
        if bool(pred):
            with self.changed:
                found = self.barrier(x)
                found.pending, found.bytes = found.pending - count, found.bytes + size
                found.settle()
                self.changed.notify_all()

    def wait(self, x: Shared, phase: Any, pred: Any = True) -> None:
        found = self.barrier(x)
        assert int(phase) in (0, 1)

        def done() -> bool:
            found.deliver()
            return found.phase & 1 != int(phase) or bool(self.failed)

        if bool(pred):
            with self.changed:
                assert self.changed.wait_for(done, PATIENCE_S), "a barrier that nobody completes"
                self.changed.notify_all()

    # copies

    def copy_in(self, desc: Descriptor, at: list[Any], x: Shared, target: Shared, pred: Any = True) -> None:
        if not bool(pred):
            return
        assert target.shape == desc.block_type.shape
        at = [int(each) for each in at]

        def arrive() -> int:
            whole, inside, part = desc.window(at)
            target.data.zero_()
            target.data[tuple(part)] = whole[tuple(inside)]
            return int(desc.block_type.nbytes)

        with self.changed:
            for each in self.barriers.values():  # what was under way to the same place may have arrived by now
                each.deliver()
            target.data.fill_(torch.nan)
            self.barrier(x).copies.append(arrive)
            self.changed.notify_all()

    def copy_out(self, desc: Descriptor, at: list[Any], source: Shared) -> None:
        assert source.shape == desc.block_type.shape
        whole, inside, part = desc.window(at)
        self._list("stores").append(lambda: whole[tuple(inside)].copy_(source.data[tuple(part)]))

    def store_wait(self, pending: int) -> None:
        stores = self._list("stores")
        while len(stores) > pending:
            stores.pop(0)()

    # atomics

    def compare_and_swap(self, pointer: Pointer, expected: int, value: int) -> Any:
        with ATOMIC:
            found = pointer.load()
            if int(found) == expected:
                pointer.store(value)
        time.sleep(1e-4)  # so that whoever is waited for has its turn
        return found

    def exchange(self, pointer: Pointer, value: int) -> None:
        with ATOMIC:
            pointer.store(value)

    # tensor cores

    def mma(self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Any:
        started = Mma(a, b, acc, use_acc)
        self._list("products").append(started)
        return started if is_async else self.mma_wait(0, deps=[started])

    def mma_wait(self, pending: int = 0, deps: Any = ()) -> Any:
        products = self._list("products")
        while len(products) > pending:
            products.pop(0).finish()
        found = tuple(each.value if isinstance(each, Mma) and each.value is not None else each for each in deps)
        return found[0] if len(found) == 1 else found

    # partitions

    def warp_specialize(self, functions: Any, warps: list[int], registers: list[int]) -> None:
        def run(function: Any, arguments: Any) -> None:
            try:
                with torch.no_grad():
                    function(*arguments)
                assert not self._list("stores"), "copies to global memory that nobody waits for"
            except BaseException as error:
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=each) for each in functions]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        if self.failed:
            raise self.failed[0]


def _language(program: Program) -> dict[str, Any]:
    """What kernels find under the names of Gluon's modules and functions."""
    from triton.experimental.gluon import language as gl

    def scalar(value: int) -> Any:
        return block(value, torch.int64)

    def loop(*bounds: Any) -> Iterator[Any]:
        return (scalar(i) for i in range(*(int(each) for each in bounds)))

    def where(condition: Any, a: Any, b: Any) -> Any:
        return torch.where(torch.as_tensor(condition), a, b)

    def fresh(kind: torch.dtype, shape: list[int], layout: object) -> Shared:
        size = [int(n) for n in shape]
        return Shared(torch.full(size, torch.nan).to(kind) if kind.is_floating_point else torch.zeros(size, dtype=kind))

    def least(a: Any, b: Any) -> Any:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def largest(a: Any, b: Any) -> Any:
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    fake = SimpleNamespace(
        **{name: getattr(gl, name) for name in dir(gl) if name.endswith("Layout")},
        **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int32", "int64", "exp2", "log2")},
        exp=torch.exp,
        program_id=lambda axis: scalar(program.at[axis]),
        num_programs=lambda axis: scalar(program.grid[axis]),
        num_warps=lambda: 4,
        arange=lambda start, end, layout=None: block(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout=None: block(torch.zeros([int(n) for n in shape], dtype=dtype)),
        full=lambda shape, value, dtype, layout=None: block(torch.full([int(n) for n in shape], value, dtype=dtype)),
        load=lambda pointer, mask=None, other=0: pointer.load(mask, other),
        store=lambda pointer, value, mask=None: pointer.store(value, mask),
        where=where,
        maximum=largest,
        minimum=least,
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        convert_layout=lambda x, layout: x,
        reshape=lambda x, shape: x.reshape([int(n) for n in shape]),
        permute=lambda x, order: x.permute(order),
        cdiv=lambda a, b: (a + b - 1) // b,
        static_range=range,
        static_assert=lambda condition: None,
        allocate_shared_memory=fresh,
        warp_specialize=program.warp_specialize,
        atomic_cas=program.compare_and_swap,
        atomic_xchg=program.exchange,
        constexpr=int,
    )
    barriers = SimpleNamespace(
        init=program.init, expect=program.expect, arrive=program.arrive, wait=program.wait, MBarrierLayout=lambda: None
    )
    copies = SimpleNamespace(
        async_copy_global_to_shared=program.copy_in,
        async_copy_shared_to_global=program.copy_out,
        store_wait=program.store_wait,
    )
    return {
        "gl": fake,
        "mbarrier": barriers,
        "tma": copies,
        "warpgroup_mma": program.mma,
        "warpgroup_mma_wait": program.mma_wait,
        "fence_async_shared": lambda: None,
        "_all_arrive": lambda: None,
        "range": loop,
    }


def _interpreted(function: Any, language: dict[str, Any], done: dict[Any, Any]) -> Any:
    """The Python function of a kernel, or of what it calls, in that language."""
    from triton.language import constexpr
    from triton.runtime.jit import JITFunction

    if function not in done:
        plain = function.fn
        names: dict[str, Any] = {}
        done[function] = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
        for name, value in plain.__globals__.items():
            if isinstance(value, JITFunction):
                names[name] = _interpreted(value, language, done)
            else:
                names[name] = value.value if isinstance(value, constexpr) else value
        names.update(language)
    return done[function]


def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], warmup: bool = False, **options: Any) -> None:
    """In place of a launch: all programs, so many at a time."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    names = kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]
    options = {name: value for name, value in options.items() if name in names}

    def argument(x: Any) -> Any:
        if isinstance(x, TensorDescriptor):
            return Descriptor(x)
        if isinstance(x, torch.Tensor):
            return Pointer.to_start(x)
        return block(x, torch.int64) if isinstance(x, int) else x

    given = [argument(each) for each in arguments]
    grid = (*grid, 1, 1)[:3]
    failed: list[BaseException] = []

    def one(place: int) -> None:
        program = Program((place % grid[0], place // grid[0] % grid[1], place // (grid[0] * grid[1])), grid)
        try:
            with torch.no_grad():
                _interpreted(kernel, _language(program), {})(*given, **options)
        except BaseException as error:
            failed.append(error)

    programs = [threading.Thread(target=one, args=(place,)) for place in range(grid[0] * grid[1] * grid[2])]
    for first in range(0, len(programs), AT_ONCE):
        for each in programs[first : first + AT_ONCE]:
            each.start()
        for each in programs[first : first + AT_ONCE]:
            each.join()
    if failed:
        raise failed[0]


@contextmanager
def gluon_on_cpu() -> Iterator[None]:
    """Launches of Gluon kernels are interpreted inside."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    def launch(self: Any, *arguments: Any, **options: Any) -> None:
        run(self, *arguments, **options)

    with patch.object(GluonJITFunction, "run", launch):
        yield
