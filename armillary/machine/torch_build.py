"""Whether the installed torch can use a GPU, found without importing it."""

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""variables that hide all GPUs where they are empty or -1"""


def torch_sees_gpus() -> bool:
    """False where torch was built without CUDA and ROCm, or all GPUs are hidden; True where that is unknown."""
    return not any(os.environ.get(name, "0").strip() in ("", "-1") for name in HIDING) and _built_for_gpus()


@cache
def _built_for_gpus() -> bool:
    spec = find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        return True
    return built_for_gpus(path.read_text(encoding="utf-8"))


def built_for_gpus(version: str) -> bool:
    """From torch's version.py: `cuda: Optional[str] = '12.8'`, `hip: Optional[str] = None`."""
    values = re.findall(r"^(?:cuda|hip)\b[^=\n]*=\s*(.+)$", version, re.MULTILINE)
    return not values or any(value.strip() != "None" for value in values)
