"""Jobs of several ranks started by torchrun: the first rank of this machine is recorded, the others run unchanged.

torchrun turns its options into one command for every rank in a single function, which is followed here.
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "torchrun")


def launches(target: Sequence[str]) -> bool:
    """Whether what is run is torchrun, as a module or as a program."""
    return (target[1] if target[0] == "-m" else Path(target[0]).name) in LAUNCHERS


def is_recorded() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def note() -> str:
    """A note on which rank was recorded; '' outside torchrun."""
    if "LOCAL_RANK" not in os.environ:
        return ""
    rank, world = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"rank {rank} of {world} was recorded"


def follow_launcher(inside: Callable[[Sequence[str]], list[str]]) -> Any:
    """Have every rank started through `inside(options and target)`; returns torchrun's module."""
    from torch.distributed import run

    plain = run.config_from_args

    @functools.wraps(plain)
    def config_from_args(args: Any) -> tuple[Any, Any, Any]:
        config, command, words = plain(args)
        if isinstance(command, str) and Path(command).name.startswith("python"):
            words = inside(words)
        return config, command, words

    run.config_from_args = config_from_args
    return run
