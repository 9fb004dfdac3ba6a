"""Traces of other people's programs: the budget as gauges, the verdict, and levers in torch's words."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.diagnose import diagnose
from armillary.diagnosis.evidence.finding import Finding
from armillary.diagnosis.levers.advice import levers_for
from armillary.diagnosis.readings.from_profile import read_profiled, reading_of
from armillary.profiling.profile import BUDGET, Gap, Row
from armillary.spec.gauges import budget_gauge
from armillary.store.home import Home
from tests.profiling.profiles import made_profile

TRACE = Path(__file__).parents[1] / "data" / "hf_loop_slow_dataset.json.gz"
Cli = Callable[..., Any]


def test_a_recorded_trace_of_a_plain_loop_through_the_command_line(cli: Cli) -> None:
    """Recorded by data/record_hf_trace.py: num_workers=0 over a slow dataset."""
    ran = cli("diagnose", str(TRACE), "--json")
    found = ran.json
    assert (ran.code, found["loop"], found["cause"]) == (0, "inner", "data_starvation")
    assert found["levers"][0]["action"] == "DataLoader(…, num_workers=3)" and 1.6 < found["levers"][0]["speedup"] < 2
    assert any(".item() is called" in note for note in found["notes"]), "free on a CPU, dear on a GPU"
    assert found["headline"].startswith("inner loop limits this run · every step waits 102 ms of 232 ms for its batch")


def test_the_same_trace_unpacked_as_a_bare_list_of_events(tmp_path: Path, cli: Cli) -> None:
    events = json.loads(gzip.decompress(TRACE.read_bytes()))["traceEvents"]
    (tmp_path / "events").write_text(json.dumps(events))
    said = cli("diagnose", str(tmp_path / "events")).out
    assert said.startswith("inner loop limits this run") and "DataLoader(…, num_workers=3)" in said


def test_a_profile_that_was_printed_is_read_like_its_trace(
    tmp_path: Path, cli: Cli, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the report goes
    printed = tmp_path / "profile.json"
    printed.write_text(cli("profile", str(TRACE), "--json").out)
    assert dict(read_profiled(printed, home).values) == pytest.approx(dict(read_profiled(TRACE, home).values))


def test_the_budget_as_gauges() -> None:
    reading = reading_of(made_profile(), "x")
    values = reading.values
    assert (reading.kind, reading.by, reading.plan) == ("profile", "torch-profiler", None)
    assert sum(values[budget_gauge(part)] for part in BUDGET) == pytest.approx(1), "of what is not waiting for data"
    assert values["data_wait_fraction"] == pytest.approx(0.023 / 0.2) and values["data_wait_s"] == pytest.approx(0.0115)
    assert values["host_fraction"] == pytest.approx(0.023 / 0.177), "the loader's part is taken out"
    assert values["step_s"] == pytest.approx(0.1) and values["kernels"] == 2065
    assert values["launch_bound_fraction"] == pytest.approx(0.012 / 0.177)
    assert values["roofline_fraction"] == pytest.approx(56 / 92)
    assert values["host_stall_fraction"] == pytest.approx(0.006 / 0.177)
    assert reading.settings["loader"] == "train.py:88" and reading.settings["sync"] == "train.py:131"


def budget(**parts: float) -> dict[str, float]:
    return {part: parts.get(part, 0.0) for part in BUDGET}


@pytest.mark.parametrize(
    ("parts", "gaps", "cause", "action"),
    [
        (budget(useful=0.06, launch_gap=0.14), (), "launch_overhead", 'torch.compile(model, mode="reduce-overhead")'),
        (
            budget(useful=0.10, launch_gap=0.02, host=0.08),
            (),
            "launch_overhead",
            'torch.compile(model, mode="reduce-overhead")',
        ),
        (
            budget(useful=0.12, sync=0.08),
            (Gap(start_s=0, seconds=0.08, cause="sync", what="item", where="a.py:7"),),
            "sync",
            "read values later, log less often, move work to a process (a.py:7)",
        ),
        (
            budget(useful=0.10, comm_exposed=0.10),
            (),
            "exposed_communication",
            "DDP: larger buckets; FSDP: prefetch; larger micro-batches between exchanges",
        ),
        (
            budget(useful=0.10, host=0.10),
            (Gap(start_s=0, seconds=0.1, cause="loader"),),
            "data_starvation",
            "DataLoader(…, num_workers=3)",
        ),
    ],
)
def test_what_a_trace_alone_tells(home: Home, parts: Any, gaps: Any, cause: str, action: str) -> None:
    found = diagnose(reading_of(made_profile(budget=parts, gaps=gaps), "x"), home)
    assert (found.cause, found.levers[0].action) == (cause, action)
    lost = {
        "launch_overhead": parts["launch_gap"] + parts["host"],
        "sync": parts["sync"],
        "exposed_communication": parts["comm_exposed"],
        "data_starvation": parts["host"],
    }[cause]
    assert found.levers[0].speedup == pytest.approx(0.2 / (0.2 - lost), rel=1e-3), "Amdahl"


def test_passes_over_memory_are_fused(home: Home) -> None:
    rows = (
        Row(name="mul", kind="kernel", work="elementwise", calls=100, device_s=0.16, roofline_s=0.15, bound="memory"),
        Row(name="mm", kind="kernel", work="gemm", calls=9, device_s=0.03, roofline_s=0.03, bound="compute"),
    )
    found = diagnose(reading_of(made_profile(budget=budget(useful=0.19, idle=0.01), rows=rows, gaps=()), "x"), home)
    assert (found.loop, found.cause, found.levers[0].action) == ("inner", "memory_bandwidth", "torch.compile(model)")
    assert found.levers[0].speedup == pytest.approx(1 / (1 - 0.8 / 2))


def test_work_at_the_roofline_is_healthy(home: Home) -> None:
    rows = (Row(name="gemm", kind="kernel", work="gemm", calls=10, device_s=0.19, roofline_s=0.18, bound="compute"),)
    found = diagnose(
        reading_of(made_profile(budget=budget(useful=0.18, inefficiency=0.01, idle=0.01), rows=rows, gaps=()), "x"),
        home,
    )
    assert found.is_healthy, found.headline


def test_a_trace_of_nothing_but_waiting_promises_no_miracle() -> None:
    reading = reading_of(made_profile(budget=budget(host=0.2), gaps=()), "x")
    all_of_it = Finding(loop="inner", cause="sync", rule="sync", says="", share=1.0, evidence=())
    assert levers_for(all_of_it, reading)[0].speedup == pytest.approx(20)
    nothing = Finding(loop="training", cause="bubble", rule="bubble", says="", share=0.5, evidence=())
    assert levers_for(nothing, reading) == ()


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("ampere_sgemm_128x64_tn", "precision"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n", "precision"),
        ("cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128", None),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_TNT", None),
    ],
)
def test_products_in_32_bits_are_known_by_their_kernels(home: Home, name: str, cause: str | None) -> None:
    rows = (Row(name=name, kind="kernel", work="gemm", calls=10, device_s=0.15, roofline_s=0.14, bound="compute"),)
    profile = made_profile(budget=budget(useful=0.14, inefficiency=0.05, idle=0.01), rows=rows, gaps=())
    found = diagnose(reading_of(profile, "x"), home)
    assert found.cause == cause
    if cause:
        assert found.levers[0].action == 'torch.autocast("cuda", dtype=torch.bfloat16)'
        assert found.levers[0].speedup == pytest.approx(1 / (0.25 + 0.75 * 60 / 800))
