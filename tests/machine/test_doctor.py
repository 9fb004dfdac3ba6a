"""The doctor: each lack has a meaning and a way out."""

from __future__ import annotations

import re
import tomllib
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.machine import doctor as module
from armillary.machine.doctor import EXTRAS, Check, doctor
from armillary.machine.gpus import Gpu
from armillary.machine.machine import machine

ROOT = Path(__file__).parent.parent.parent


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def fake_torch(version: str = "2.13.0", *, cuda: bool = False) -> Any:
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda="12.9" if cuda else None, hip=None),
        cuda=SimpleNamespace(is_available=lambda: cuda, device_count=lambda: 2, get_device_name=lambda i: "H200"),
        backends=SimpleNamespace(mps=SimpleNamespace(is_available=lambda: False)),
        distributed=SimpleNamespace(
            is_available=lambda: True,
            is_nccl_available=lambda: cuda,
            is_gloo_available=lambda: True,
            is_mpi_available=lambda: False,
        ),
    )


def test_everything_that_is_missing_says_what_it_means_and_how_to_get_it(tmp_path: Path) -> None:
    checks = doctor(tmp_path)
    assert {"python", "torch", "accelerator", "triton", "C++ compiler", "collectives", "disk"} <= set(by_name(checks))
    assert all(check.means for check in checks if check.state != "ok")
    assert all(check.fix for check in checks if check.state == "missing")


def test_a_folder_not_made_yet_is_judged_by_its_disk(tmp_path: Path) -> None:
    assert str(tmp_path) in by_name(doctor(tmp_path / "a" / "b"))["disk"].finding


@pytest.mark.parametrize(
    ("version", "state"), [("2.11.0", "ok"), ("2.13.0+cpu", "ok"), ("2.10.1", "warn"), ("2.14.0a0+git", "warn")]
)
def test_torch_is_judged_by_the_tested_range(version: str, state: str) -> None:
    check = module._torch(fake_torch(version))
    assert check.state == state
    assert bool(check.fix) is (state != "ok")


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    checks = by_name(doctor(host=machine()))
    assert checks["torch"].state == "missing" and "armillary[torch]" in checks["torch"].fix
    assert checks["collectives"].state == "missing"
    assert checks["extra data"].fix == "pip install 'armillary[data]'"


def test_accelerators() -> None:
    idle = replace(machine(), gpus=(Gpu(name="NVIDIA H200", vendor="NVIDIA"),))
    assert module._accelerators(fake_torch(cuda=True), idle).finding == "2 × H200"
    assert module._accelerators(fake_torch(), idle).state == "missing"
    assert module._accelerators(fake_torch(), replace(idle, gpus=())).state == "warn"


def test_small_shared_memory_is_the_usual_trap_of_containers() -> None:
    found = replace(machine(), shm_bytes=64e6)
    assert "--shm-size" in module._shm(found).fix
    assert module._shm(replace(found, shm_bytes=None)).state == "ok"


def test_cores_and_memory_say_what_limits_them() -> None:
    plain = machine()
    cpu = replace(plain.cpu, present=64, usable=1, threads=1, why="quota of 1 CPU of cgroup /job")
    found = replace(plain, cpu=cpu, memory_bytes=4e9, memory_why="memory.max of cgroup /job")
    assert module._cores(found).finding == "1 of 64 usable, 1 compute (quota of 1 CPU of cgroup /job)"
    assert module._cores(found).fix
    assert module._cores(replace(found, cpu=replace(cpu, why=""))).state == "ok"
    assert module._memory(found).finding.endswith("(memory.max of cgroup /job)")


def test_dtypes() -> None:
    plain = machine()
    without = replace(plain, cpu=replace(plain.cpu, units={"bf16": "", "fp16": "asimdhp", "int8": "asimddp"}))
    assert module._dtypes(without).finding == "bf16: emulated; fp16: asimdhp; int8: asimddp"
    assert "auto" in module._dtypes(without).fix
    having = replace(plain, cpu=replace(plain.cpu, units={"bf16": "amx_bf16", "fp16": "", "int8": "amx_int8"}))
    assert module._dtypes(having).state == "ok"
    unknown = replace(plain, cpu=replace(plain.cpu, units={}))
    assert module._dtypes(unknown).state == "ok"


def test_little_memory() -> None:
    assert module._memory(replace(machine(), memory_bytes=32e9, available_bytes=1e9)).state == "warn"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")(100, 99, 1)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage)
    assert "--home" in module._disk(tmp_path).fix


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    check = module._compiler()
    assert check.state == "warn" and "apt install g++" in check.fix


def test_hub_settings_are_read_and_the_hub_is_not_asked(tmp_path: Path) -> None:
    assert "offline" in module._hub({"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}).finding
    assert module._hub({"HF_HOME": str(tmp_path)}).fix == "hf auth login"
    (tmp_path / "token").write_text("hf_x")
    assert module._hub({"HF_HOME": str(tmp_path)}).finding.startswith("token set")


def test_extras_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    modules = {
        "nvidia_ml_py": "pynvml",
        "opentelemetry_exporter_otlp_proto_http": "opentelemetry",
        "pytest_xdist": "xdist",
        "python_docx": "docx",
        "python_pptx": "pptx",
        "XlsxWriter": "xlsxwriter",
    }
    names = {
        line: re.split(r"[\[><=]", line)[0].replace("-", "_")
        for lines in project["optional-dependencies"].values()
        for line in lines
    }
    listed = {
        extra: tuple(sorted(modules.get(names[line], names[line]) for line in lines))
        for extra, lines in project["optional-dependencies"].items()
    }
    assert {extra: tuple(sorted(brought)) for extra, brought in EXTRAS.items()} == listed
