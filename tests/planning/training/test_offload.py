"""Offload in a plan: which bytes leave, where they go, and what the step stands still for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadLayout
from armillary.planning.device_model.frameworks import OURS, PHYSICS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.training import offload
from armillary.planning.training.layout_prediction import Prediction, predict
from armillary.planning.training.memory_breakdown import memory
from armillary.planning.training.remedies import remedy, remedy_text
from armillary.planning.training.resolve_recipe import TrainingProblem
from armillary.planning.training.search import search
from armillary.planning.training.search_space import constrained, runnable, space
from armillary.planning.training.train_case import TrainCase
from armillary.planning.training.training_plan import training_plan
from armillary.spec.arithmetic.params import parameters
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import layout_problems
from armillary.spec.recipe import Recipe
from armillary.spec.tables.model import ModelTable
from armillary.spec.tables.train import TrainJob
from armillary.store.peaks import new_peaks
from tests.planning.cases import case_of, small_model

MODEL = small_model(num_layers=16)
COUNT = parameters(MODEL).total


def one_gpu(**more: Any) -> TrainCase:
    return case_of(MODEL, "h200x1", sequences=8, software=OURS, **more)


def priced(case: TrainCase, **layout: Any) -> Prediction:
    return predict(case, as_arrays([Layout(**({"micro_batch": 8} | layout))]))


def test_on_one_gpu_states_and_fp32_weights_leave_but_for_the_table_that_is_looked_up() -> None:
    here, out = (priced(one_gpu(), offload=what).memory for what in ("none", "optimizer"))
    assert here.optimizer[0] == pytest.approx(8 * COUNT, rel=1e-4) and out.optimizer[0] == 0
    table = MODEL.vocab * MODEL.hidden
    assert out.master[0] == pytest.approx(4 * table if MODEL.tied else 2 * table)
    assert out.weights[0] == here.weights[0] and out.activations[0] == here.activations[0]
    assert out.host[0] == pytest.approx(12 * COUNT + 2 * 4 * min(COUNT, 1 << 25), rel=1e-4)


def test_shards_of_fp32_weights_stay_on_their_devices() -> None:
    case = case_of(MODEL, "h200x8", sequences=8, software=OURS)
    here, out = (priced(case, dp=8, zero=3, micro_batch=1, offload=what).memory for what in ("none", "optimizer"))
    assert out.master[0] == here.master[0] > 0 and out.optimizer[0] == 0
    assert 12 * COUNT / 8 <= out.host[0] <= 20 * COUNT / 8


def test_activations_leave_all_but_two_layers() -> None:
    here, out = (priced(one_gpu(), offload=what).memory for what in ("none", "activations"))
    assert out.activations[0] < 0.25 * here.activations[0]
    assert out.host[0] == pytest.approx(15 / 16 * here.activations[0], rel=0.1)


def test_a_forward_pass_hides_all_of_the_host_but_its_first_and_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_gpu()
    slow = priced(case, offload="optimizer").time
    parameters = slow.work.parameters
    alone = offload.host_adamw_s(case, as_arrays([Layout(micro_batch=8)]), parameters)[0]
    forward = slow.work.micro_batch_time[0] / 3
    assert alone - forward <= slow.offload[0] <= alone
    monkeypatch.setattr(offload, "HOST_BYTES_PER_S", 1e15)
    monkeypatch.setattr(offload, "link_rate", lambda case: 1e15)
    assert priced(case, offload="optimizer").time.offload[0] < 0.1 * forward


def test_a_measured_link_is_used_and_a_slow_one_shows() -> None:
    def seconds(rate: float) -> float:
        point = {"bytes": 1 << 28, "direction": "to_host", "pinned": True, "bytes_per_s": rate, "seconds": 1.0}
        peaks = new_peaks("H200 SXM", {}).with_points("host_copy", [point])
        return float(priced(one_gpu(measured=peaks), offload="activations").time.offload[0])

    moved = priced(one_gpu(), offload="activations").memory.host[0]
    assert seconds(1e13) == 0
    assert seconds(1e9) == pytest.approx(2 * moved / 1e9, rel=0.1)
    assert seconds(2e9) < seconds(1e9)


def test_a_measured_step_on_the_host_is_used() -> None:
    point = {"bytes": 28 << 26, "direction": "adamw", "pinned": False, "bytes_per_s": 36e9, "seconds": 1.0}
    case = one_gpu(measured=new_peaks("H200 SXM", {}).with_points("host_copy", [point]))
    parameters = priced(case).time.work.parameters
    assert offload.host_adamw_s(case, as_arrays([Layout()]), parameters)[0] == pytest.approx(COUNT / 1e9, rel=1e-3)
    assert offload.link_rate(case) == offload.link_rate(one_gpu()), "no copy was measured"


def test_a_mapped_file_is_slower_than_memory_and_disks_count_where_the_host_cannot_hold_it() -> None:
    case = one_gpu()
    node = case.cluster.node
    assert node is not None and node.memory_bytes
    cached = priced(case, offload="nvme").time.offload[0]
    assert cached > priced(case, offload="optimizer").time.offload[0]
    small = replace(case, cluster=replace(case.cluster, node=replace(node, memory_bytes=1e9, num_drives=2)))
    assert priced(small, offload="nvme").time.offload[0] > cached


@settings(deadline=None)
@given(
    st.sampled_from(["none", "optimizer", "activations", "both", "nvme"]),
    st.sampled_from(["none", "full"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0, 1, 3]),
)
def test_the_parts_of_a_step_add_up_and_memory_never_grows_by_more_than_a_layer(
    out: str, recompute: str, dp: int, zero: int
) -> None:
    case = case_of(MODEL, "h200x4", sequences=8, software=OURS)
    given = {"dp": dp, "zero": zero, "recompute": recompute, "micro_batch": 1}
    here, there = priced(case, **given), priced(case, **given, offload=out)
    assert there.time.offload[0] >= 0
    assert there.time.total[0] >= here.time.total[0] - here.time.optimizer[0] - 1e-9
    layer = here.memory.activations[0] / MODEL.num_layers
    assert there.memory.total[0] <= here.memory.total[0] + 1.05 * layer
    assert bool(there.memory.host[0] > 0) is (out != "none")


def test_what_does_not_fit_may_be_offloaded_and_says_its_price() -> None:
    case = case_of("llama-2-13b", "h200x1", sequences=8, software=OURS)
    found = remedy(case, Layout(recompute="full"))
    assert found is not None and found.change["offload"] in ("optimizer", "both")
    gauges = priced(case, micro_batch=1, offload="optimizer").gauges()
    assert gauges["offloaded_bytes"] > 12 * 13e9 and gauges["offload_s"] > 1
    assert "offload_s" not in priced(case, micro_batch=1).gauges()
    cpu = memory(case, as_arrays([Layout(offload="nvme")])).host[0]
    assert cpu > 12 * 13e9


def test_the_host_runs_beside_the_next_step_wherever_the_trainer_lets_it() -> None:
    """training.offloading: a GPU, whole weights, one stage, not compiled."""
    case = case_of(MODEL, "h200x8", sequences=8, software=OURS)

    def hidden(case: TrainCase, **layout: Any) -> bool:
        found = priced(case, micro_batch=1, offload="optimizer", **layout).time
        return bool(
            found.offload[0] < offload.host_adamw_s(case, as_arrays([Layout(**layout)]), found.work.parameters)[0]
        )

    assert hidden(case) and hidden(case, dp=8) and hidden(case, tp=8) and hidden(case, cp=2, dp=4)
    assert not hidden(case, dp=8, zero=1) and not hidden(case, cp=2, zero=3) and not hidden(case, pp=2)
    assert not hidden(replace(case, compiled=True)) and not hidden(replace(case, software=PHYSICS))


def with_host(case: TrainCase, memory: float, disks: float) -> TrainCase:
    assert case.cluster.node is not None
    node = replace(case.cluster.node, num_chips=1, memory_bytes=memory, storage_bytes=disks)
    return replace(case, cluster=replace(case.cluster, node=node))


def test_what_the_host_has_no_room_for_does_not_fit_and_goes_to_disk_where_that_helps() -> None:
    case = case_of("llama-2-13b", "h200x1", sequences=8, software=OURS)
    layout = Layout(recompute="full", offload="optimizer")
    assert predict(case, as_arrays([layout])).fits[0]
    short = with_host(case, 100e9, 1e12)
    assert not predict(short, as_arrays([layout])).fits[0]
    found = remedy(short, layout)
    assert found is not None and found.change == {"offload": "nvme"}
    with pytest.raises(BadLayout, match=r"offload=optimizer .* try --set layout.offload=nvme"):
        search(short, fixed={"offload": "optimizer"})
    assert search(short, fixed={"offload": "nvme"}).num_fitting > 0
    job = TrainJob(sequence=case.sequence, batch_tokens=case.batch_tokens)
    recipe = Recipe(model=ModelTable(name="llama-2-13b"), layout=layout, train=job)
    problem = TrainingProblem(recipe=recipe, requested=recipe, model=case.model, case=short)
    made = training_plan(problem, predict(short, as_arrays([layout])))
    assert made.shortage.endswith("the host's memory has 100 GB per device") and not made.fits
    assert made.notes()[-1].startswith(f"does not fit: {made.shortage}; try --set layout.offload=nvme")
    full = with_host(case, 100e9, 100e9)
    assert not predict(full, as_arrays([replace(layout, offload="nvme")])).fits[0]
    assert "offload" not in remedy_text(full, layout)


def test_a_search_offers_nothing_that_the_trainer_refuses_together() -> None:
    case = case_of(MODEL, "h200x8", sequences=8, software=OURS)
    trainer = Case(model=MODEL, sequence=case.sequence, batch_tokens=case.batch_tokens, by_trainer=True)
    for fixed in ({"offload": "activations"}, {"schedule": "zero_bubble"}):
        offered = constrained(space(case, ["bf16"]), fixed)
        kept = runnable(case, offered, fixed)
        broken = [
            sum(any(layout_problems(layouts.layout(i), trainer)) for i in range(len(layouts)))
            for layouts in (offered, kept)
        ]
        assert broken[0] > 0 and broken[1] == 0 and len(kept) == len(offered) - broken[0]
        with pytest.raises(BadLayout, match=r"try --set layout\.recompute=full or none"):
            search(case, fixed={**fixed, "recompute": "selective", "pp": 2})
    with pytest.raises(BadLayout, match=r"try --set layout\.zero=2"):
        search(case, fixed={"schedule": "zero_bubble", "zero": 3, "pp": 2})
    assert search(case, fixed={"schedule": "zero_bubble", "zero": 2, "pp": 2}).num_fitting > 0
    found = search(replace(case, software=PHYSICS), fixed={"offload": "activations", "recompute": "selective"})
    assert np.all(found.front.fits)
