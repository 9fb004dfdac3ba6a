"""Whether this machine has a GPU, by its device files: without torch, which would start the driver."""

from __future__ import annotations

import shutil
from pathlib import Path


def gpu_present() -> bool:
    return bool(shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists())
