"""Demo reports made by hand, for what shows them."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from typing import Any

from armillary.diagnosis.evidence.finding import Evidence, Finding, Lever
from armillary.diagnosis.outcome.compare import Comparison
from armillary.diagnosis.outcome.diagnosis import Diagnosis
from armillary.diagnosis.readings.reading import Reading
from armillary.diagnosis.report.demo_report import DemoReport, Served, Service, Stage
from armillary.serving.load.client_lag import Lag
from armillary.serving.load.record import RequestResult
from armillary.serving.load.run import LoadReport, LoadTest, RunResult
from armillary.serving.load.summary import summary
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.plan import Plan
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Load, Objective, Traffic
from armillary.spec.tables.train import TrainJob
from tests.profiling.profiles import made_profile


def made_load(ttft_s: float) -> LoadReport:
    """Forty answers of eight pieces, the later ones slower."""
    answers = []
    for i in range(40):
        first = i / 4 + ttft_s * (0.5 + i / 40)
        stamps = tuple(first + 0.01 * k for k in range(8))
        answers.append(
            RequestResult(
                index=i,
                due_s=i / 4,
                sent_s=i / 4,
                end_s=stamps[-1],
                stamps_s=stamps,
                tokens_in=64,
                tokens_out=8,
                counted_by="usage",
            )
        )
    found = summary(answers, Objective(ttft_p99_s=1.0), Lag(), begin_s=0.0, end_s=10.0)
    ran = RunResult(summary=found, results=tuple(answers), begin_s=0.0, end_s=10.0)
    test = LoadTest(traffic=Traffic(requests_per_s=4.0), load=Load(), objective=Objective(ttft_p99_s=1.0))
    return LoadReport(url="made", model="tiny", api="completions", test=test, runs=(ran,), notes=())


def made_plan(**changes: Any) -> Plan:
    cluster = replace(catalogue.cluster("h100"), name="here")
    return Plan(
        created="2026-11-15T09:30:00Z",
        model=catalogue.model("armillary-5m").config,
        cluster=cluster,
        layout=Layout(dp=1),
        **changes,
    )


def made_report(**changes: Any) -> DemoReport:
    """A complete report: 200 steps stopped after 80, a server before and after its lever."""
    records = tuple(
        {
            "time": 0.2 * i + (9.0 if i > 80 else 0.0),
            "step": i,
            "step_s": 0.2,
            "loss": 4.5 + 4 * exp(-i / 40),
            "tokens_total": 65_536.0 * (i + 1),
            **({"val_loss": 4.6 + 4 * exp(-i / 40)} if (i + 1) % 50 == 0 else {}),
        }
        for i in range(200)
    )
    training = Reading(
        source="run quiet-otter",
        kind="training",
        steps=records,
        values={"memory_peak_bytes": 9.1e8},
        plan=made_plan(
            train=TrainJob(steps=200),
            predicted={
                "step_s": 0.19,
                "memory_peak_bytes": 9.4e8,
                "bubble_s": 0.0,
                "model_flops_per_token": 2.5e7,
                "run_s": 38.0,
                "tokens_per_s": 10_800.0,
                "mfu": 0.066,
                "batch_tokens": 65_536.0,
                "micro_batches": 64.0,
            },
        ),
    )
    serving = Reading(
        source="run calm-finch",
        kind="serving",
        plan=made_plan(serve=Serve(), predicted={"ttft_p50_s": 0.05, "kv_capacity_tokens": 31_250.0}),
    )
    lever = Lever(
        title="recompute full → none",
        change={"layout.recompute": "none"},
        speedup=1.22,
        risk="+ 0.05 GB",
        basis="planner",
    )
    other = Lever(title="compile the blocks", change={"train.compile": True}, speedup=1.04)
    wider = Lever(title="max_running 2 → 16", change={"serve.max_running": 16}, speedup=3.1, of="ttft_p99_s")
    evidence = (Evidence(gauge="recompute_s", value=0.034, expected=0.0, against="with memory to spare"),)
    finding = Finding(
        loop="training",
        cause="needless_recompute",
        rule="needless_recompute",
        share=0.18,
        says="activations are made again although they fit",
        evidence=evidence,
        levers=(lever,),
    )
    product = replace(
        finding,
        loop="product",
        cause="batch_too_small",
        says="requests wait while the batch is full",
        evidence=(Evidence(gauge="queue_p50_s", value=0.6),),
        levers=(wider,),
    )
    values: dict[str, Any] = {
        "title": "armillary-5m on 2 × core",
        "created": "2026-11-15 20:00 UTC",
        "stages": (
            Stage(name="measure", seconds=14.0, said="bf16 310 GFLOP/s · memory 21 GB/s"),
            Stage(name="train", seconds=61.0, said="200 steps, interrupted after 80 and resumed"),
        ),
        "records": records,
        "stops": (80,),
        "training": training,
        "profile": made_profile(),
        "served": Served(reading=serving, load=made_load(0.9)),
        "served_after": Served(reading=serving, load=made_load(0.12), peak_bytes=5e8),
        "service": Service(
            replicas=(("replica-1", 23), ("replica-2", 17)),
            releases=("demo:1", "demo:2"),
            promoted_s=6.2,
            added_p50_s=0.0004,
            added_p99_s=0.0031,
            load=made_load(0.1),
        ),
        "diagnoses": (
            Diagnosis(
                source="run quiet-otter",
                kind="training",
                created="2026-11-15T20:00:00Z",
                loop="training",
                cause="needless_recompute",
                headline="training loop limits this run · recomputing",
                gain=0.22,
                budget={
                    "useful": 0.41,
                    "inefficiency": 0.3,
                    "comm_exposed": 0.05,
                    "host": 0.2,
                    "validation": 0.03,
                    "data_wait": 0.01,
                },
                findings=(finding,),
                levers=(lever, other),
            ),
            Diagnosis(
                source="run calm-finch",
                kind="serving",
                created="2026-11-15T20:00:00Z",
                loop="product",
                cause="batch_too_small",
                headline="product loop limits this run · batch too small",
                gain=2.1,
                findings=(product,),
                levers=(wider,),
            ),
        ),
        "pulled": (
            Comparison(
                a="a",
                b="b",
                of="step_s",
                before=0.2,
                after=0.165,
                obtained=1.21,
                predicted=1.22,
                title=lever.title,
                change=lever.change,
            ),
            Comparison(
                a="c",
                b="d",
                of="ttft_p99_s",
                before=1.3,
                after=0.4,
                obtained=3.25,
                predicted=3.1,
                title=wider.title,
                change=wider.change,
            ),
        ),
    }
    return DemoReport(**(values | changes))
