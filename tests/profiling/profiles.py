"""A profile made by hand, for what shows profiles."""

from __future__ import annotations

from typing import Any

from armillary.profiling.profile import Gap, MemoryTimeline, Profile, Roofline, Row


def made_profile(**changes: Any) -> Profile:
    """Two steps of 100 ms on a made-up GPU: one GEMM, one norm, one copy, tiny elementwise kernels."""
    roofline = Roofline(
        device="Made GPU", flops={"bf16": 800e12, "fp32": 60e12}, bytes_per_s=4e12, launch_s=3e-6, source="measured"
    )
    rows = (
        Row(
            name="gemm_kernel<float, 128, 64>",
            kind="kernel",
            work="gemm",
            calls=64,
            device_s=0.060,
            flops=3.6e13,
            bytes=3e10,
            roofline_s=0.045,
            bound="compute",
            module="blocks.0.mlp",
            details={"registers": 232, "occupancy_percent": 25},
        ),
        Row(
            name="rms_norm",
            kind="kernel",
            work="norm",
            calls=64,
            device_s=0.020,
            flops=8e9,
            bytes=4e10,
            roofline_s=0.010,
            bound="memory",
            module="blocks.0.norm",
        ),
        Row(
            name="add",
            kind="kernel",
            work="elementwise",
            calls=4000,
            device_s=0.012,
            flops=2e8,
            bytes=2.4e9,
            roofline_s=0.0006,
            bound="overhead",
        ),
        Row(name="Memcpy HtoD", kind="kernel", work="copy", calls=2, device_s=0.006, bytes=1e8),
        Row(
            name="aten::mm",
            kind="operator",
            work="gemm",
            calls=64,
            device_s=0.060,
            cpu_s=0.002,
            flops=3.6e13,
            bytes=3e10,
            roofline_s=0.045,
            bound="compute",
            module="blocks.0.mlp",
        ),
    )
    values: dict[str, Any] = {
        "source": "train.py",
        "device": "cuda: Made GPU",
        "wall_s": 0.2,
        "steps": 2,
        "budget": {
            "useful": 0.056,
            "inefficiency": 0.036,
            "launch_gap": 0.052,
            "host": 0.046,
            "sync": 0.008,
            "unknown": 0.002,
        },
        "rows": rows,
        "gaps": (
            Gap(start_s=0.01, seconds=0.023, cause="loader", what="time.sleep", where="train.py:88"),
            Gap(start_s=0.06, seconds=0.006, cause="sync", what="aten::item", where="train.py:131"),
        ),
        "memory": MemoryTimeline(
            times_s=tuple(i / 1000 for i in range(200)),
            bytes=tuple(2e9 + 3e9 * min(i % 100, 100 - i % 100) / 50 for i in range(200)),
            peak_bytes=5e9,
            peak_s=0.05,
            by_category={"weights": 2e9, "activations": 3e9},
            by_module={"blocks.0.mlp": 1.2e9, "blocks.1.mlp": 0.8e9},
        ),
        "roofline": roofline,
        "findings": ("loader starves the device 23 ms per step at train.py:88", "item() at train.py:131 blocks 6 ms"),
        "notes": ("a step takes 97 ms without the profiler, 100 ms with it",),
    }
    return Profile(**(values | changes))
