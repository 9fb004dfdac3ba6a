"""Whether the installed torch can use a GPU at all, without importing it: a CPU build computes on the CPU."""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""variables that hide every GPU where they are set to nothing or -1"""


def torch_sees_gpus() -> bool:
    """False where torch was built without CUDA and ROCm, or every GPU is hidden; True where nothing is known."""
    return not any(os.environ.get(name, "0").strip() in ("", "-1") for name in HIDING) and _built_for_gpus()


@cache
def _built_for_gpus() -> bool:
    found = find_spec("torch")
    path = Path(found.origin).with_name("version.py") if found is not None and found.origin else None
    if path is None or not path.is_file():
        return True
    return built_for_gpus(path.read_text(encoding="utf-8"))


def built_for_gpus(version: str) -> bool:
    """From torch's version.py: `cuda: Optional[str] = '12.8'`, `hip: Optional[str] = None`."""
    values = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", version, re.MULTILINE)
    return not values or any(value.strip() != "None" for value in values)
