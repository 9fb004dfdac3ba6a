"""Which errors mean that memory was asked for and not there: a smaller step may still do."""

from __future__ import annotations

_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "alloc_failed",
    "could not create a memory",
    "failed to allocate",
)
"""in errors of torch's CPU allocator (Linux, Windows), CUDA's runtime and drivers, C++, cuBLAS and oneDNN"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)


def first_line(error: BaseException) -> str:
    """What it says, without the advice and the C++ frames behind it."""
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return said.split(". ")[0][:160]
