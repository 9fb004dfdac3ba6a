"""The accelerators of this machine, from nvidia-smi and rocm-smi, and whether the installed torch can use them.

The drivers' tools rather than NVML, because every GPU machine has them, while training and serving must not need a
package; torch is not imported. What a tool does not report stays None. Parsing is separate, so that it is tested
without a GPU.
"""

import csv
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""variables that hide all GPUs where they are empty or -1"""
_QUERY = ("name", "memory.total", "driver_version", "pcie.link.gen.max", "pcie.link.width.max", "compute_cap")
_TIMEOUT_S = 20
_MIB = 2**20
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator of this machine; `capability` is the compute capability (NVIDIA) or the gfx name (AMD), PCIe
    that of its slot."""

    name: str
    vendor: str
    memory_bytes: float | None = None
    driver: str = ""
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    capability: str = ""


def gpus() -> tuple[Gpu, ...]:
    """Every NVIDIA and AMD accelerator that the drivers' tools list."""
    nvidia = ask("nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits")
    amd = ask("rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--json")
    return (*parse_nvidia(nvidia or ""), *parse_amd(amd or ""))


def gpu_links() -> Mapping[str, str]:
    """'0-1' -> 'NV18', 'PIX', 'SYS' … for each pair of NVIDIA GPUs."""
    return parse_topology(ask("nvidia-smi", "topo", "-m") or "")


def parse_nvidia(text: str) -> tuple[Gpu, ...]:
    """Lines of `nvidia-smi --query-gpu` with the fields of _QUERY; unsupported fields are '[N/A]'."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if len(row) == len(_QUERY)]
    return tuple(
        Gpu(
            name=name,
            vendor="NVIDIA",
            memory_bytes=float(memory) * _MIB if _is_number(memory) else None,
            driver=driver,
            pcie_generation=_integer(generation),
            pcie_lanes=_integer(lanes),
            capability=capability if _is_number(capability) else "",
        )
        for name, memory, driver, generation, lanes, capability in rows
    )


def parse_amd(text: str) -> tuple[Gpu, ...]:
    """The JSON of rocm-smi: one object per card, and a 'system' object with the driver."""
    try:
        cards = json.loads(text) if text else {}
    except json.JSONDecodeError:
        return ()
    driver = str(cards.get("system", {}).get("Driver version", ""))
    return tuple(_amd_card(card, driver) for key, card in sorted(cards.items()) if key.startswith("card"))


def _amd_card(card: Mapping[str, str], driver: str) -> Gpu:
    lower = {key.lower(): value for key, value in card.items()}
    memory = lower.get("vram total memory (b)", "")
    return Gpu(
        name=lower.get("card series") or lower.get("card model") or "AMD GPU",
        vendor="AMD",
        memory_bytes=float(memory) if _is_number(memory) else None,
        driver=driver,
        capability=lower.get("gfx version", ""),
    )


def parse_topology(text: str) -> Mapping[str, str]:
    """The matrix of `nvidia-smi topo -m`, upper triangle."""
    rows = [_ANSI.sub("", line).split() for line in text.splitlines()]
    gpu_rows = [row[1:] for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    count = len(gpu_rows)
    return {f"{i}-{j}": gpu_rows[i][j] for i in range(count) for j in range(i + 1, count) if j < len(gpu_rows[i])}


def ask(program: str, *arguments: str) -> str | None:
    """The output of a driver's tool; None where it is missing, fails or hangs."""
    if shutil.which(program) is None:
        return None
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (subprocess.TimeoutExpired, OSError):
        return None
    return done.stdout if done.returncode == 0 else None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None


# --- torch's build


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
