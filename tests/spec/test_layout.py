"""Layouts divide or say what to change; what they suggest works."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadLayout
from armillary.spec import catalogue
from armillary.spec.layout import Layout
from armillary.spec.layout_rules.case import Case
from armillary.spec.layout_rules.rules import check_layout, layout_problems
from armillary.spec.model import LayerKind, ModelConfig, MoE
from armillary.spec.toml.fields import build, to_plain


def model(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "name": "armillary-25m",
        "hidden": 512,
        "heads": 16,
        "kv_heads": 8,
        "head_dim": 32,
        "ffn": 1536,
        "vocab": 8192,
        "context": 1024,
        "layers": (LayerKind(),) * 8,
    }
    return ModelConfig(**(base | changes))


def experts(num: int = 8, **changes: Any) -> ModelConfig:
    return model(layers=(LayerKind(mlp="moe"),) * 8, moe=MoE(num_experts=num, top_k=2, ffn=256), **changes)


def dense_first(*, ffn: int = 1536, expert: int = 256, shared: int = 256) -> ModelConfig:
    layers = (LayerKind(), *(LayerKind(mlp="moe"),) * 7)
    return model(ffn=ffn, layers=layers, moe=MoE(num_experts=8, top_k=2, ffn=expert, shared_ffn=shared))


def refusal(layout: Layout, config: ModelConfig | None = None, **case: Any) -> str:
    with pytest.raises(BadLayout) as caught:
        check_layout(layout, config or model(), **case)
    return str(caught.value)


def test_devices_are_dp_tp_pp_cp() -> None:
    layout = Layout(dp=2, tp=4, pp=3, cp=5, ep=2)
    assert layout.num_devices == 120 and layout.text() == "dp=2 × tp=4 × pp=3 × cp=5"
    assert Layout(dp=3, tp=2).on_devices(16).dp == 8
    with pytest.raises(BadLayout, match=r"9 devices are not a multiple of tp=2; use 8, or try --set layout.tp=1$"):
        Layout(tp=2).on_devices(9)
    with pytest.raises(BadLayout, match=r"multiple of pp=8; use 8, or try --set layout.pp=6$"):
        Layout(pp=8).on_devices(6)


def test_what_zero_shares_out() -> None:
    assert Layout(dp=8).shard_size == 1
    assert Layout(dp=8, zero=1).shard_size == 8
    assert Layout(dp=8, zero=3, shard=4).shard_size == 4


def hybrid() -> ModelConfig:
    return catalogue.model("qwen3-next-80b-a3b").config


def test_recurrent_layers_are_not_sharded_along_the_sequence() -> None:
    check_layout(Layout(dp=2, tp=2, pp=2, ep=2, zero=3), hybrid())
    with pytest.raises(BadLayout, match=r"cp=2 shards sequences and the gated delta-net layers .*layout.cp=1"):
        check_layout(Layout(cp=2), hybrid(), sequence=4096)
    with pytest.raises(BadLayout, match="tp=32 does not divide"):
        check_layout(Layout(tp=32), hybrid(), for_training=False)


def test_experts_are_cut_by_tp_unless_ep_takes_the_tp_ranks() -> None:
    assert Layout(dp=4, tp=2, ep=4).expert_tp == 2
    assert Layout(dp=4, tp=2, ep=8).expert_tp == 1
    check_layout(Layout(dp=4, tp=2, ep=8), experts())


def test_the_tour_s_refusals() -> None:
    assert refusal(Layout(tp=3)) == ("tp=3 does not divide 8 KV heads of armillary-25m; try --set layout.tp=2 or 4")
    assert refusal(Layout(tp=4, pp=4), num_devices=8) == "8 devices cannot hold tp=4 × pp=4: try --set layout.pp=2"


@pytest.mark.parametrize(
    ("layout", "config", "case", "sentence"),
    [
        (Layout(tp=16), model(), {}, "tp=16 does not divide 8 KV heads of armillary-25m; try --set layout.tp=8"),
        (
            Layout(tp=3),
            model(kv_heads=16),
            {},
            "tp=3 does not divide 16 KV heads of armillary-25m; try --set layout.tp=2 or 4",
        ),
        (
            Layout(tp=8),
            model(ffn=1540),
            {},
            "tp=8 does not divide the ffn of 1540 of armillary-25m; try --set layout.tp=4",
        ),
        (
            Layout(tp=8),
            dense_first(ffn=1540),
            {},
            "tp=8 does not divide the ffn of 1540 in the dense layers of armillary-25m; try --set layout.tp=4",
        ),
        (
            Layout(tp=8),
            dense_first(expert=252),
            {},
            "tp=8 does not divide the expert ffn of 252 of armillary-25m; try --set layout.tp=4",
        ),
        (
            Layout(tp=8),
            dense_first(shared=260),
            {},
            "tp=8 does not divide the shared-expert ffn of 260 of armillary-25m; try --set layout.tp=4",
        ),
        (Layout(dp=2), model(), {"num_devices": 1}, "1 device cannot hold dp=2: try --set layout.dp=1"),
        (
            Layout(pp=11),
            model(),
            {},
            "pp=11 makes more chunks than armillary-25m has layers, embedding and head (10); try --set layout.pp=10",
        ),
        (
            Layout(pp=4, interleave=3, schedule="interleaved"),
            model(),
            {},
            "pp=4 × interleave=3 makes more chunks than armillary-25m has layers, embedding and head (10); "
            "try --set layout.interleave=2",
        ),
        (
            Layout(pp=2, interleave=2),
            model(),
            {},
            "schedule=1f1b runs one chunk per stage, not interleave=2; try --set layout.schedule=interleaved",
        ),
        (
            Layout(pp=2, schedule="interleaved"),
            model(),
            {},
            "schedule=interleaved needs at least two chunks per stage; try --set layout.schedule=1f1b",
        ),
        (Layout(interleave=2), model(), {}, "interleave=2 needs pipeline stages; try --set layout.interleave=1"),
        (
            Layout(cp=3),
            model(),
            {"sequence": 512},
            "cp=3 does not divide a sequence of 512 into 2 × 3 equal chunks (zig-zag); try --set layout.cp=2 or 4",
        ),
        (
            Layout(tp=2),
            model(),
            {"sequence": 511},
            "tp=2 does not divide a sequence of 511; try --set layout.sequence_parallel=false",
        ),
        (Layout(ep=2), model(), {}, "ep=2 but armillary-25m has no experts; try --set layout.ep=1"),
        (
            Layout(dp=12, ep=3),
            experts(),
            {},
            "ep=3 does not divide 8 experts of armillary-25m; try --set layout.ep=2 or 4",
        ),
        (
            Layout(dp=2, ep=4),
            experts(),
            {},
            "ep=4 does not divide dp × cp × tp = 2 (--devices 4 would do); try --set layout.ep=2",
        ),
        (Layout(dp=8, zero=3, shard=3), model(), {}, "shard=3 does not divide dp=8; try --set layout.shard=2 or 4"),
        (Layout(dp=8, shard=4), model(), {}, "shard=4 but zero=0 shards nothing; try --set layout.zero=3"),
        (
            Layout(dp=2, micro_batch=3),
            model(),
            {"sequence": 512, "batch_tokens": 32_768},
            "a batch of 32768 tokens is not a multiple of sequence=512 × micro_batch=3 × dp=2; "
            "try --set layout.micro_batch=2",
        ),
        (
            Layout(dp=3),
            model(),
            {"sequence": 512, "batch_tokens": 32_768},
            "a batch of 32768 tokens is not a multiple of sequence=512 × micro_batch=1 × dp=3; "
            "try --set train.batch_tokens=32256",
        ),
    ],
)
def test_refusals_say_what_to_change(layout: Layout, config: ModelConfig, case: dict[str, Any], sentence: str) -> None:
    assert refusal(layout, config, **case) == sentence


def test_serving_replicates_kv_heads_and_training_does_not() -> None:
    check_layout(Layout(tp=16), model(), for_training=False)
    assert "KV heads" in refusal(Layout(tp=16))


def test_uneven_stages_and_idle_devices_are_allowed() -> None:
    check_layout(Layout(pp=3), model(), num_devices=8)
    check_layout(Layout(pp=5, interleave=2, schedule="interleaved"), model())  # embedding and head alone


def test_interleaved_takes_micro_batches_pp_at_a_time() -> None:
    layout = Layout(pp=4, interleave=2, schedule="interleaved")
    check_layout(layout, model(), sequence=512, batch_tokens=512 * 8)
    assert refusal(layout, sequence=512, batch_tokens=512 * 6).endswith("× pp=4; try --set train.batch_tokens=2048")


def test_our_trainer_has_rules_of_its_own() -> None:
    steps = dict(sequence=64, batch_tokens=9 * 64, by_trainer=True)
    assert refusal(Layout(pp=4, schedule="zero_bubble"), **steps) == (
        "schedule=zero_bubble runs 9 micro-batches in rounds of about pp=4, which do not divide them evenly; "
        "try --set train.batch_tokens=512"
    )
    check_layout(Layout(pp=4, schedule="1f1b"), model(), **steps)
    over_tp = Layout(dp=2, tp=2, ep=4)
    check_layout(over_tp, experts())
    assert refusal(over_tp, experts(), by_trainer=True).endswith("(--devices 8 would do); try --set layout.ep=2")


def test_latent_attention_has_no_kv_heads_to_cut() -> None:
    from armillary.spec.model import MLA

    latent = MLA(q_rank=None, kv_rank=64, nope_dim=32, rope_dim=16, v_dim=32)
    check_layout(Layout(tp=16), model(kv_heads=1, mla=latent))


@pytest.mark.parametrize("field", ["dp", "tp", "pp", "cp", "ep", "micro_batch", "recompute_every", "shard"])
def test_zero_of_anything_is_refused(field: str) -> None:
    with pytest.raises(BadLayout, match=rf"layout\.{field}=0 must be at least 1; try --set layout\.{field}="):
        Layout(**{field: 0})
    with pytest.raises(BadLayout, match="0 devices"):
        check_layout(Layout(), model(), num_devices=0)


def test_a_layout_is_its_table() -> None:
    layout = Layout(dp=4, zero=3, shard=2, precision="fp8")
    assert build(Layout, to_plain(layout), "layout") == layout
    assert build(Layout, {"zero": "3", "shard": "none"}, "layout") == Layout(zero=3)


LAYOUTS = st.builds(
    Layout,
    dp=st.integers(1, 9),
    tp=st.integers(1, 20),
    pp=st.integers(1, 14),
    interleave=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
    cp=st.integers(1, 5),
    ep=st.integers(1, 9),
    zero=st.sampled_from([0, 1, 2, 3]),
    shard=st.none() | st.integers(1, 9),
    micro_batch=st.integers(1, 6),
    recompute=st.sampled_from(["none", "selective", "full"]),
    offload=st.sampled_from(["none", "activations", "both"]),
)
CASES = st.builds(
    Case,
    model=st.sampled_from([model(), model(kv_heads=16, ffn=1000), experts(), experts(12, heads=8, kv_heads=2)]),
    num_devices=st.none() | st.integers(1, 64),
    sequence=st.sampled_from([None, 512, 1000, 37]),
    batch_tokens=st.sampled_from([None, 37_000, 65_536, 512]),
    for_training=st.booleans(),
    by_trainer=st.booleans(),
    compiled=st.booleans(),
)


def changes(text: str) -> list[dict[str, str]]:
    """Every alternative that a sentence offers: 'layout.tp=2 or 4' is two."""
    offered = re.findall(r"--set ((?:layout|train)\.\w+)=(\S+)(?: or (\S+))?", text)
    options = [[(key, value) for value in values if value] for key, *values in offered]
    return [dict(choice) for choice in product(*options)]


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, CASES)
def test_every_suggestion_removes_its_error(layout: Layout, case: Case) -> None:
    for problem in layout_problems(layout, case):
        assert changes(problem.text), problem.text
        for change in changes(problem.text):
            values = to_plain(layout) | {
                k.removeprefix("layout."): v for k, v in change.items() if k.startswith("layout.")
            }
            batch = change.get("train.batch_tokens")
            against = replace(case, batch_tokens=int(batch)) if batch else case
            left = {other.rule for other in layout_problems(build(Layout, values, "layout"), against)}
            assert problem.rule not in left, problem.text


@settings(deadline=None)
@given(LAYOUTS, CASES)
def test_a_refusal_names_the_first_problem_and_ends_with_a_layout_that_breaks_no_rule(
    layout: Layout, case: Case
) -> None:
    problems = list(layout_problems(layout, case))
    keys = ("num_devices", "sequence", "batch_tokens", "for_training", "by_trainer", "compiled")
    arguments = {k: getattr(case, k) for k in keys}
    if not problems:
        return check_layout(layout, case.model, **arguments)
    text = refusal(layout, case.model, **arguments)
    assert text.rpartition(" try ")[0] == problems[0].text.rpartition(" try ")[0]
    for change in changes(text):
        values = {k.removeprefix("layout."): v for k, v in change.items() if k.startswith("layout.")}
        arguments["batch_tokens"] = int(change.get("train.batch_tokens", 0)) or case.batch_tokens
        check_layout(build(Layout, to_plain(layout) | values, "layout"), case.model, **arguments)


@settings(deadline=None)
@given(LAYOUTS, CASES, st.integers(1, 16))
def test_where_devices_are_given_a_refusal_ends_with_a_layout_that_uses_them_all(
    layout: Layout, case: Case, fills: int
) -> None:
    case = replace(case, num_devices=None, fills=fills)
    keys = ("fills", "sequence", "batch_tokens", "for_training", "by_trainer", "compiled")
    layout, arguments = case.filled(layout), {k: getattr(case, k) for k in keys}
    if next(layout_problems(layout, case), None) is None:
        return
    for change in changes(refusal(layout, case.model, **arguments)):
        values = {k.removeprefix("layout."): v for k, v in change.items() if k.startswith("layout.")}
        arguments["batch_tokens"] = int(change.get("train.batch_tokens", 0)) or case.batch_tokens
        mended = case.filled(build(Layout, to_plain(layout) | values, "layout"))
        check_layout(mended, case.model, **arguments)
        assert mended.num_devices == fills


def test_what_the_trainer_cannot_keep_selectively_is_refused_for_it_alone() -> None:
    away = Layout(recompute="selective", offload="both")
    halves = Layout(pp=2, recompute="selective", schedule="zero_bubble")
    wanted = "try --set layout.recompute=full or none"
    for layout, said in ((away, "offload=both does not cover"), (halves, "zero-bubble stages cannot")):
        text = refusal(layout, by_trainer=True)
        assert text.startswith(said) and text.endswith(wanted)
        check_layout(layout, model())
        check_layout(replace(layout, recompute="full"), model(), by_trainer=True)
    check_layout(replace(halves, pp=1), model(), by_trainer=True)
    check_layout(replace(away, offload="optimizer"), model(), by_trainer=True)


def test_zero_bubble_stages_keep_their_weights_whole() -> None:
    """Zero-3 is refused for our trainer, rather than becoming zero-2 without a word."""
    layout = Layout(pp=2, dp=2, zero=3, schedule="zero_bubble")
    assert refusal(layout, by_trainer=True) == (
        "zero-bubble stages need full weights between the two parts of a backward pass, which zero=3 shards; "
        "try --set layout.zero=2 (or layout.schedule=1f1b)"
    )
    chunks = replace(layout, interleave=2)
    assert refusal(chunks, by_trainer=True).endswith("try --set layout.zero=2 (or layout.schedule=interleaved)")
    check_layout(layout, model())
    for fine in (replace(layout, zero=2), replace(layout, schedule="1f1b"), replace(layout, dp=1)):
        check_layout(fine, model(), by_trainer=True)


def test_several_mistakes_are_mended_together_and_no_more_than_needed() -> None:
    layout = Layout(dp=4, tp=3, pp=2, schedule="interleaved", ep=3)
    text = refusal(layout, experts(), num_devices=32, sequence=512, batch_tokens=65_536)
    assert text == (
        "tp=3 does not divide 8 KV heads of armillary-25m; "
        "try --set layout.tp=2 --set layout.schedule=1f1b --set layout.ep=2"
    )
