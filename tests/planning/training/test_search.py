"""Search: every layout it offers is valid and fits, the best is no worse than what people chose, and it says why."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from armillary.errors import BadInput, BadLayout
from armillary.planning.device_model.frameworks import OURS
from armillary.planning.device_model.vectorised_layouts import as_arrays
from armillary.planning.node_ranking import rank_nodes
from armillary.planning.training.explain import explain
from armillary.planning.training.layout_prediction import predict
from armillary.planning.training.remedies import remedy, remedy_text
from armillary.planning.training.search import Counted, fastest, limits, search, why
from armillary.planning.training.search_space import space, supported
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.rules import check_layout
from armillary.spec.tables.traffic import Cost
from tests.planning.cases import case_of, small_model


def test_every_layout_of_the_space_is_valid() -> None:
    """And what is offered for our trainer, our trainer runs."""
    for case in (
        case_of("mixtral-8x7b", "h100x16", sequences=32),
        case_of(small_model(), "a100x8", sequences=16),
        case_of("mixtral-8x7b", "h100x16", sequences=32, software=OURS),
    ):
        layouts = space(case)
        assert len(layouts) > 100
        for i in range(0, len(layouts), max(1, len(layouts) // 150)):
            layout = layouts.layout(i)
            check_layout(
                layout,
                case.model,
                num_devices=case.cluster.num_devices,
                sequence=case.sequence,
                batch_tokens=case.batch_tokens,
                by_trainer=case.software is OURS,
            )
            assert layout.num_devices == case.cluster.num_devices


def test_the_front_is_what_nothing_beats() -> None:
    found = search(case_of("llama-3-8b", "h100x8"))
    seconds, bytes_ = found.front.time.total, found.front.memory.total
    assert (np.diff(seconds) > 0).all() and (np.diff(bytes_) < 0).all()
    assert seconds[0] == found.best.time.total[0] and found.front.fits.all()


def test_405_billion_on_16384_devices_beats_the_published_layout() -> None:
    """Llama 3 405B trained with tp 8, pp 16, dp 128 (arXiv 2407.21783, table 4)."""
    case = case_of("llama-3.1-405b", "h100x16384", sequence=8192, sequences=2048)
    published = Layout(tp=8, pp=16, dp=128, interleave=8, schedule="interleaved", zero=1, recompute="selective")
    found = search(case, precisions=["bf16"])
    assert found.num_valid > 20_000
    assert found.best.time.total[0] <= predict(case, as_arrays([published])).time.total[0]
    assert 0.3 < found.best.mfu[0] < 0.6


def test_runners_up_and_limits_are_explained() -> None:
    found = search(case_of("llama-3-70b", "h100x64", sequences=128))
    assert all("slower" in line for line in why(found)) and len(why(found)) == 3
    shares = limits(found.best.time)
    assert shares[0].work == "GEMMs" and sum(row.share for row in shares) == pytest.approx(1, abs=0.01)


def test_less_memory_never_makes_it_quicker() -> None:
    case = case_of("llama-3-8b", "h100x8")
    assert search(case, memory_bytes=50e9).best.time.total[0] >= search(case).best.time.total[0]


def test_a_model_bigger_than_the_cluster_is_one_sentence() -> None:
    with pytest.raises(BadLayout, match=r"no layout of llama-3.1-405b fits .* try about"):
        search(case_of("llama-3.1-405b", "a100x8", sequences=64))
    narrow = small_model(num_layers=1, heads=1, kv_heads=1)
    with pytest.raises(BadInput, match="no layout divides"):
        search(case_of(narrow, "h100x64", sequences=7))


def test_formats_are_those_the_chip_is_faster_in() -> None:
    assert supported(catalogue.chip("h100")) == ["bf16", "fp8"] and supported(catalogue.chip("a100")) == ["bf16"]


# --- what would fit


def test_the_remedy_fits_and_is_the_quickest_single_change() -> None:
    case = case_of("llama-3-8b", "h100x8")
    found = remedy(case, Layout(dp=8))
    assert found is not None and len(found.change) <= 2
    assert predict(case, as_arrays([found.layout])).fits[0]
    assert "--set layout." in remedy_text(case, Layout(dp=8))


def test_where_no_change_helps_more_devices_are_named() -> None:
    assert "--on h100x" in remedy_text(case_of("llama-3.1-405b", "h100x8"), Layout(tp=8))


def test_more_memory_never_breaks_a_plan() -> None:
    case = case_of("llama-3-8b", "h100x8")
    roomy = replace(case, cluster=replace(case.cluster, chip=replace(case.cluster.chip, memory_bytes=400e9)))
    small, large = (search(one) for one in (case, roomy))
    assert large.num_fitting > small.num_fitting
    assert large.best.time.total[0] <= small.best.time.total[0]


# --- explaining and ranking


def test_the_explanation_adds_up_to_the_plan() -> None:
    found = predict(case_of("llama-3-70b", "h100x64", sequences=128), as_arrays([Layout(dp=2, tp=4, pp=8, zero=1)]))
    terms = {term.name: term for term in explain(found)}
    assert terms["step"].value == pytest.approx(float(found.time.total[0]))
    names = [
        "GEMMs",
        "attention",
        "memory-bound operations",
        "recompute",
        "contention",
        "pipeline fill and drain",
        "uneven stages",
        "optimizer",
        "waiting for launches",
        "slowest node",
        "waiting for data",
        "step, other",
    ]
    names += [name for name in terms if name.endswith("exposed")]
    assert sum(terms[name].value for name in names) == pytest.approx(terms["step"].value)
    sizes = [term.value for name, term in terms.items() if name.startswith("memory, ") and name != "memory, all"]
    assert sum(sizes) == pytest.approx(terms["memory, all"].value)
    assert all(term.formula for term in terms.values())


def test_nodes_are_ranked_with_reason_where_they_will_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {name: catalogue.nodes()[name] for name in ("dgx-h100", "dgx-a100", "dgx-1-p100")}
    monkeypatch.setattr(catalogue, "nodes", lambda: nodes)
    ranked = rank_nodes(case_of("llama-3-70b", "h100x8", sequences=64), devices=16, steps=100, cost=Cost())
    assert ranked[0].best is not None and ranked[-1].best is None and "fits" in ranked[-1].reason
    assert ranked[0].frameworks


def test_the_devices_named_where_nothing_fits_do_fit() -> None:
    with pytest.raises(BadLayout, match="try about 128 devices"):
        search(case_of("llama-3.1-405b", "h100x8", sequences=128))
    assert search(case_of("llama-3.1-405b", "h100x128", sequences=128)).num_fitting > 0


def test_the_fastest_is_the_first_of_the_whole_search() -> None:
    """Though it leaves out layouts that recompute more than they must, and counts memory once for several chips."""
    counted: Counted = {}
    asked = [("llama-3.1-8b", on) for on in ("h100x8", "h200x8", "a100-80gb-sxmx8")]
    for name, on in (*asked, ("llama-3.1-70b", "h100x16"), ("mixtral-8x7b", "h200x16")):
        case = case_of(name, on, sequences=16)
        first, best = search(case, shown=1).best, fastest(case, counted if name == "llama-3.1-8b" else None)
        assert best.layout() == first.layout()
        assert best.time.total[0] == first.time.total[0] and best.memory.total[0] == first.memory.total[0]
    assert len(counted) == 2, "both Hoppers share theirs"
