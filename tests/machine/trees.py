"""Made-up trees of /proc and /sys, and Macs, for the readers of armillary/machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GB = 10**9
GIB = 2**30
V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
NO_LIMIT_V1 = 9223372036854771712
"""what version 1 writes where nothing is limited"""


def write(root: Path, files: Mapping[str, object]) -> Path:
    """Each file with its text, its folders made."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def linux(root: Path, *, cores: int = 64, memory: int = 256 * GIB, available: int = 200 * GIB) -> Path:
    """A machine of `cores` x86 cores without hyper-threads or limits."""
    listed = f"0-{cores - 1}" if cores > 1 else "0"
    return write(
        root,
        {
            "proc/cpuinfo": "\n".join(f"processor\t: {n}\nmodel name\t: Test CPU\n" for n in range(cores)),
            "proc/meminfo": f"MemTotal: {memory // 1024} kB\nMemAvailable: {available // 1024} kB\nHugePages_Total: 0",
            "proc/self/status": f"Name:\ttest\nCpus_allowed_list:\t{listed}\nMems_allowed_list:\t0",
            "sys/devices/system/cpu/online": listed,
        },
    )


def v2_groups(root: Path, own: str, files: Mapping[str, object]) -> Path:
    """cgroup version 2 mounted at /sys/fs/cgroup, the process in `own`; files are named below the mount."""
    write(root, {"proc/self/cgroup": f"0::{own}", "proc/self/mountinfo": V2})
    (root / "sys/fs/cgroup" / own.lstrip("/")).mkdir(parents=True, exist_ok=True)
    return write(root, {f"sys/fs/cgroup/{name}": content for name, content in files.items()})


def v1_mounts(*controllers: str, top: str = "/") -> str:
    """Lines of mountinfo for version 1 hierarchies; 'cpu,cpuacct' are two controllers in one."""
    lines = (
        f"{30 + n} 23 0:{26 + n} {top} /sys/fs/cgroup/{name} rw shared:{n} - cgroup cgroup rw,{name}"
        for n, name in enumerate(controllers)
    )
    return "\n".join(lines)


def mac(root: Path, *, facts: Mapping[str, object], vm_stat: str = "") -> Path:
    """A Mac: no /proc; sysctl knows `facts` and fails for other names, as the real one does."""
    cases = "\n".join(f'  {name}) echo "{value}" ;;' for name, value in facts.items())
    programs = {
        "usr/sbin/sysctl": f'#!/bin/sh\ncase "$2" in\n{cases}\n  *) exit 1 ;;\nesac',
        "usr/bin/vm_stat": f"#!/bin/sh\ncat <<'END'\n{vm_stat}\nEND",
    }
    write(root, programs)
    for name in programs:
        (root / name).chmod(0o755)
    return root


M1 = {
    "machdep.cpu.brand_string": "Apple M1",
    "hw.memsize": 8 * GIB,
    "hw.logicalcpu": 8,
    "hw.physicalcpu": 8,
    "hw.perflevel0.physicalcpu": 4,
    "hw.optional.arm.FEAT_BF16": 0,
    "hw.optional.arm.FEAT_FP16": 1,
    "hw.optional.arm.FEAT_I8MM": 0,
    "hw.optional.arm.FEAT_DotProd": 1,
    "hw.optional.AdvSIMD": 1,
}

N1_FEATURES = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
V2_FEATURES = f"{N1_FEATURES} sve sve2 i8mm bf16 svebf16 svei8mm"
SKYLAKE_FLAGS = "fpu sse4_1 avx f16c fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl"
SAPPHIRE_FLAGS = f"{SKYLAKE_FLAGS} avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_bf16 amx_int8"
LAPTOP_FLAGS = "fpu sse4_1 avx f16c fma avx2"


def arm_cores(*kinds: tuple[int, str, str, str, str], features: str = N1_FEATURES) -> str:
    """cpuinfo of an ARM machine: (how many, implementer, part, variant, revision) of each kind of core."""
    each = [kind[1:] for kind in kinds for _ in range(kind[0])]
    return "\n\n".join(
        f"processor\t: {n}\nBogoMIPS\t: 50.00\nFeatures\t: {features}\nCPU implementer\t: {implementer}\n"
        f"CPU architecture: 8\nCPU variant\t: {variant}\nCPU part\t: {part}\nCPU revision\t: {revision}"
        for n, (implementer, part, variant, revision) in enumerate(each)
    )


def x86_cores(name: str, *, model: int, stepping: int, flags: str, cores: int = 2, family: int = 6) -> str:
    """cpuinfo of an x86 machine."""
    return "\n\n".join(
        f"processor\t: {n}\nvendor_id\t: GenuineIntel\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: {name}\nstepping\t: {stepping}\nphysical id\t: 0\ncore id\t: {n}\nflags\t\t: {flags}"
        for n in range(cores)
    )
