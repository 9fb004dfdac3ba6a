"""Checks of this machine: what works, what does not, and how to fix it.

`doctor()` returns a list of checks, each with its finding, its consequence and its fix; none uses the network. torch is
imported inside a check, because only torch itself knows what it can do.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from armillary.machine.machine import Machine, machine
from armillary.units import bytes_text

TORCH_TESTED = ((2, 11), (2, 13))
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "data": ("fsspec", "pyarrow"),
    "gateway": ("redis",),
    "documents": ("docx", "pptx", "typst", "xlsxwriter"),
    "http": ("aiohttp", "httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop"),
    "hub": ("datasets",),
    "kubernetes": ("kubernetes",),
    "nvidia": ("pynvml",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "otel": ("opentelemetry",),
    "quantize": ("gguf",),
    "ray": ("ray",),
    "registry": ("cryptography", "fsspec"),
    "structure": ("llguidance",),
    "tracking": ("mlflow", "tensorboard", "wandb"),
    "dev": (
        "axe_playwright_python",
        "compressed_tensors",
        "cryptography",
        "docx",
        "gguf",
        "hypothesis",
        "llguidance",
        "mypy",
        "onnx",
        "onnxruntime",
        "onnxscript",
        "openai",
        "openpyxl",
        "opentelemetry",
        "playwright",
        "pptx",
        "pypdf",
        "pytest",
        "redis",
        "ruff",
        "schemathesis",
        "tensorboard",
        "transformers",
        "triton",
        "typst",
        "xdist",
        "xlsxwriter",
    ),
}
_LINUX_ONLY = ("triton",)

_EXTRA_FOR = {
    "torch": "training, generating and converting",
    "data": "reading Parquet and stores (s3://, https://)",
    "gateway": "limits that several gateways share through Redis",
    "documents": "reports as Word, Excel, PDF and slides",
    "http": "serving over HTTP",
    "hub": "data of the Hugging Face Hub (hub:OWNER/NAME)",
    "kubernetes": "armillary launch --on kubernetes",
    "nvidia": "reading clocks and power of NVIDIA GPUs",
    "onnx": "writing and serving ONNX files",
    "otel": "sending traces to OpenTelemetry",
    "quantize": "writing GGUF files",
    "ray": "armillary launch --on ray and data prepare --on ray",
    "registry": "signing releases, and registries in stores (s3://, gs://)",
    "structure": "outputs that match a JSON schema, regular expression or grammar",
    "tracking": "TensorBoard, MLflow and Weights & Biases",
    "dev": "running the tests",
}
_LOW_DISK_BYTES, _LOW_SHM_BYTES, _LOW_MEMORY_BYTES, _LOW_FILES = 10e9, 1e9, 4e9, 4096

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: its finding, what that means and how to fix it. A warning works with a limitation; where something
    is missing, something does not work."""

    name: str
    state: State
    finding: str
    means: str = ""
    fix: str = ""


def doctor(directory: Path = Path("."), host: Machine | None = None) -> list[Check]:
    """All checks; `directory` is the folder for runs."""
    host = host or machine()
    torch = _import_torch()
    return [
        _python(),
        _torch(torch),
        _accelerators(torch, host),
        _triton(),
        _compiler(),
        _collectives(torch),
        _cores(host),
        _dtypes(host),
        _memory(host),
        _shm(host),
        _disk(directory),
        _open_files(),
        _hub(os.environ),
        *(_extra(name) for name in EXTRAS if name != "torch"),
    ]


def _warn_unless(good: bool, name: str, finding: str, *, means: str, fix: str) -> Check:
    if good:
        return Check(name=name, state="ok", finding=finding)
    return Check(name=name, state="warn", finding=finding, means=means, fix=fix)


# --- software


def _python() -> Check:
    return Check(name="python", state="ok", finding=f"{platform.python_version()} at {sys.executable}")


def _import_torch() -> Any:
    """torch, or None where it is not installed; a broken installation raises."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch


def _torch(torch: Any) -> Check:
    if torch is None:
        return Check(
            name="torch",
            state="missing",
            finding="not installed",
            means=f"no {_EXTRA_FOR['torch']}",
            fix="pip install 'armillary[torch]'",
        )
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU build"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    low, high = (".".join(map(str, bound)) for bound in TORCH_TESTED)
    return _warn_unless(
        TORCH_TESTED[0] <= version <= TORCH_TESTED[1],
        "torch",
        f"{torch.__version__}, {build}",
        means=f"tested with {low} to {high} only",
        fix=f"pip install 'torch=={high}.*'",
    )


def _accelerators(torch: Any, host: Machine) -> Check:
    if torch is not None and torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Check(name="accelerator", state="ok", finding=f"{len(names)} × {', '.join(dict.fromkeys(names))}")
    if torch is not None and torch.backends.mps.is_available():
        return Check(name="accelerator", state="ok", finding="Apple GPU (mps)")
    if host.gpus:
        return Check(
            name="accelerator",
            state="missing",
            finding=f"{host.gpus[0].name}, but torch cannot use it",
            means="work runs on the CPU",
            fix="install a CUDA or ROCm build of torch that fits the driver",
        )
    isa = " ".join(flag for flag in ("amx_bf16", "avx512f", "avx2", "sve") if flag in host.cpu.isa)
    return Check(
        name="accelerator",
        state="warn",
        finding=f"none; {host.cpu.usable} CPU cores {isa}".rstrip(),
        means="small models only; CUDA paths are off and their tests skip",
    )


def _triton() -> Check:
    version = _version("triton")
    return _warn_unless(
        version is not None,
        "triton",
        version or "not installed",
        means="Triton kernels are off; reference versions run instead",
        fix="comes with CUDA builds of torch on Linux, and with 'armillary[dev]'",
    )


def _compiler() -> Check:
    compiler = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), None)
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    return _warn_unless(
        bool(compiler and headers),
        "C++ compiler",
        "no compiler" if not compiler else compiler if headers else "no Python.h",
        means="torch.compile on the CPU and the C++ kernels of packed weights are off; their tests skip",
        fix="Debian: apt install g++ python3-dev; macOS: xcode-select --install",
    )


def _collectives(torch: Any) -> Check:
    if torch is None or not torch.distributed.is_available():
        return Check(
            name="collectives",
            state="missing",
            finding="none",
            means="one process only",
            fix="install torch with distributed support",
        )
    dist = torch.distributed
    backends = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    present = [name for name, available in backends.items() if available]
    if torch.cuda.is_available() and "nccl" not in present:
        return Check(
            name="collectives",
            state="warn",
            finding=", ".join(present),
            means="many GPUs will be slow",
            fix="install a torch build with NCCL",
        )
    return Check(name="collectives", state="ok" if present else "missing", finding=", ".join(present) or "none")


def _extra(name: str) -> Check:
    modules = [module for module in EXTRAS[name] if sys.platform == "linux" or module not in _LINUX_ONLY]
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    return _warn_unless(
        not absent,
        f"extra {name}",
        f"without {', '.join(absent)}" if absent else ", ".join(modules),
        means=f"{'no' if len(absent) == len(modules) else 'not all of'} {_EXTRA_FOR[name]}",
        fix=f"pip install 'armillary[{name}]'",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- resources


def _cores(host: Machine) -> Check:
    cpu = host.cpu
    return _warn_unless(
        not cpu.why,
        "cores",
        f"{cpu.usable} of {cpu.present} usable, {cpu.threads} compute" + (f" ({cpu.why})" if cpu.why else ""),
        means="work uses these cores only",
        fix="raise the container's CPU limit, or start without taskset or numactl",
    )


def _dtypes(host: Machine) -> Check:
    """Dtypes that the CPU supports natively; the others are emulated."""
    units = host.cpu.units
    return _warn_unless(
        not units or bool(units["bf16"]),
        "dtypes",
        "; ".join(f"{dtype}: {unit or 'emulated'}" for dtype, unit in units.items()) or "not reported by the CPU",
        means="bf16 on this CPU may be far slower than fp32",
        fix="leave layout.precision and serve.dtype at auto, which takes the faster one",
    )


def _memory(host: Machine) -> Check:
    free = host.available_bytes
    text = bytes_text(host.memory_bytes) + (f", {bytes_text(free)} free" if free is not None else "")
    return _warn_unless(
        (host.memory_bytes if free is None else free) >= _LOW_MEMORY_BYTES,
        "memory",
        text + (f" ({host.memory_why})" if host.memory_why else ""),
        means="training may be killed for lack of memory",
        fix="close other programs, or lower train.batch_tokens",
    )


def _shm(host: Machine) -> Check:
    return _warn_unless(
        host.shm_bytes is None or host.shm_bytes >= _LOW_SHM_BYTES,
        "shared memory",
        "not used on this system" if host.shm_bytes is None else bytes_text(host.shm_bytes),
        means="loader workers and ranks may die with a bus error",
        fix="in a container: docker run --shm-size=8g (or --ipc=host)",
    )


def _disk(directory: Path) -> Check:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return _warn_unless(
        free >= _LOW_DISK_BYTES,
        "disk",
        f"{bytes_text(free)} free at {existing}",
        means="checkpoints may not fit",
        fix="free some space, or give another folder with --home DIR",
    )


def _open_files() -> Check:
    try:
        import resource
    except ImportError:  # Windows
        return Check(name="open files", state="ok", finding="no limit known")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _warn_unless(
        soft >= _LOW_FILES or soft == resource.RLIM_INFINITY,
        "open files",
        f"{soft:,}" + (f" (may be raised to {hard:,})" if soft < hard else ""),
        means="many ranks, shards or connections may run out",
        fix=f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}",
    )


def _hub(environment: Mapping[str, str]) -> Check:
    """Settings of huggingface_hub; the Hub itself is not contacted."""
    cache = Path(environment.get("HF_HOME") or Path.home() / ".cache/huggingface")
    token = bool(environment.get("HF_TOKEN")) or (cache / "token").is_file()
    if environment.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return Check(
            name="Hugging Face Hub",
            state="warn",
            finding=f"offline mode; cache at {cache}",
            means="only models already in the cache",
            fix="unset HF_HUB_OFFLINE",
        )
    text = f"{'token set' if token else 'no token'}; cache at {cache}"
    means = "" if token else "gated models (Llama, Gemma) cannot be downloaded"
    return Check(name="Hugging Face Hub", state="ok", finding=text, means=means, fix="" if token else "hf auth login")
