"""choose(): the fastest that agrees; wrong ones are found out, absent ones passed over, choices remembered."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from armillary.errors import BadInput
from armillary.kernels.core.choose_version import choose, explain
from armillary.kernels.core.dtype import widen
from armillary.kernels.core.op import Case, LazyFunction, Op, OpWork, Version, compiled
from armillary.kernels.norm.norm import NORM, NormCase
from armillary.machine.device_name import device_name
from armillary.store.home import Home
from armillary.store.kernel_choices import choices_path, load_choices


@dataclass(frozen=True, kw_only=True)
class Row(Case):
    """A row of numbers."""

    size: int = 64
    """numbers"""


CASE = Row(dtype="fp32", device="cpu")


def reference(x: Tensor, scale: float) -> Tensor:
    time.sleep(3e-3)  # so that the quick one always wins, beside other work too
    return (widen(x).square() * scale).to(x.dtype)


def quick(x: Tensor, scale: float) -> Tensor:
    return x * x * scale


def wrong(x: Tensor, scale: float) -> Tensor:
    return x * x * (scale + 1e-3)


def wrong_backward(x: Tensor, scale: float) -> Tensor:
    return x.detach() * x * scale  # the right value, half the gradient


def fails(x: Tensor, scale: float) -> Tensor:
    raise RuntimeError("no such instruction\nand more")


def inputs(case: Row, generator: torch.Generator) -> tuple[Any, ...]:
    return torch.randn(case.size, generator=generator).to(case.torch_dtype), 0.5


def an_op(*versions: Version) -> Op:
    work = OpWork(flops=128, bytes=512)
    return Op(name="squares", reference=reference, versions=versions, inputs=inputs, work=lambda case: work, grads=(0,))


QUICK = Version(name="quick", run=quick)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"dtype": "fp7"}, "no kernels for dtype"),
        ({"device": "tpu"}, "try cpu or cuda"),
        ({"device": "cuda"}, "no GPU"),
    ],
)
def test_a_case_that_nothing_can_run_is_one_line(wrong: dict[str, str], words: str) -> None:
    if wrong == {"device": "cuda"} and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BadInput, match=words):
        choose(NORM, NormCase(rows=1, columns=8, **{"device": "cpu", **wrong}))


def test_the_fastest_that_agrees_is_taken() -> None:
    choice = choose(an_op(Version(name="wrong", run=wrong), QUICK), CASE)
    assert choice.version == "quick" and choice.run is quick
    trials = {trial.version: trial for trial in choice.candidates}
    assert set(trials) == {"wrong", "quick", "eager"}
    assert not trials["wrong"].agreed and "output 0 is off by" in trials["wrong"].refused
    assert trials["quick"].error is not None and trials["quick"].error < 1e-6
    assert trials["eager"].seconds > trials["quick"].seconds > 0


def test_a_wrong_gradient_is_found_out() -> None:
    choice = choose(an_op(Version(name="bad", run=wrong_backward)), CASE)
    (bad, _) = choice.candidates
    assert choice.version == "eager" and "gradient of argument 0" in bad.refused


def test_a_reference_that_is_too_large_is_timed_only_where_nothing_else_agrees() -> None:
    large = replace(an_op(QUICK), reference_refuses=lambda case: "it would hold 9 GB")
    quick, eager = choose(large, CASE).candidates
    assert quick.agreed and eager.refused == "it would hold 9 GB" and eager.seconds is None
    alone = choose(replace(large, versions=(Version(name="wrong", run=wrong),)), CASE)
    assert alone.version == "eager" and alone.candidates[-1].seconds


def test_explained() -> None:
    lines = explain(choose(an_op(Version(name="wrong", run=wrong), QUICK), CASE))
    assert lines[0] == "squares 64 fp32: quick" and "µs" in lines[1] and lines[-1].startswith("  wrong: output 0")


def test_what_refuses_or_fails_is_passed_over_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    picky = Version(name="picky", run=quick, refuses=lambda case: "size must be odd" if case.size % 2 == 0 else None)
    op = replace(an_op(picky, Version(name="fails", run=fails)), name="said once")
    with caplog.at_level(logging.WARNING, logger="armillary.kernels"):
        assert choose(op, CASE).version == choose(op, CASE).version == "eager"
    said = [record.message for record in caplog.records]
    assert said == [
        "said once 64 fp32: version picky is not used: size must be odd",
        "said once 64 fp32: version fails is not used: failed: RuntimeError: no such instruction",
    ]
    assert choose(op, replace(CASE, size=63)).version == "picky"


def test_a_gpu_version_is_no_news_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    late = LazyFunction("armillary.kernels.nowhere_triton", "nothing")
    choice = choose(an_op(Version(name="triton", run=late, needs=("triton",))), CASE)
    assert choice.version == "eager" and not caplog.records
    assert choice.candidates[0].refused in ("runs on a GPU only", "triton is not installed")


def test_a_choice_is_remembered_per_case(home: Home) -> None:
    op = an_op(QUICK)
    first, again, other = (choose(op, case, home=home) for case in (CASE, CASE, replace(CASE, size=8)))
    assert [choice.remembered for choice in (first, again, other)] == [False, True, False]
    assert again.version == "quick" and again.candidates == first.candidates
    assert len(load_choices(home, device_name("cpu", threads=torch.get_num_threads()))) == 2


def test_a_remembered_version_that_is_gone_is_not_used(home: Home) -> None:
    choose(an_op(QUICK), CASE, home=home)
    choice = choose(an_op(), CASE, home=home)
    assert choice.version == "eager" and not choice.remembered


@pytest.mark.parametrize(
    "kept", ["{", '{"device": "DEVICE", "choices": {"KEY": {"version": "quick", "trials": [{"x": 1}]}}}']
)
def test_a_store_that_cannot_be_used_is_said_and_passed_over(
    kept: str, home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    op = an_op(Version(name="quick", run=quick))
    first = choose(op, CASE, home=home)
    device = device_name("cpu", threads=torch.get_num_threads())
    (key,) = load_choices(home, device)
    text = kept.replace("DEVICE", device).replace("KEY", key.replace('"', '\\"'))
    choices_path(home, device).write_text(text)
    assert choose(op, CASE, home=home).version == first.version
    assert "tried again" in caplog.text


def test_deterministic_mode_takes_the_order_and_times_nothing(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    import armillary.kernels.core.choose_version as module

    monkeypatch.setattr(module, "time_version", lambda *args, **kwargs: pytest.fail("timed"))
    slow = Version(name="slow", run=lambda x, scale: reference(x, scale))
    loose = Version(name="atomics", run=quick, deterministic=False)
    choice = choose(an_op(loose, Version(name="wrong", run=wrong), slow, QUICK), CASE, home=home, deterministic=True)
    assert choice.version == "slow" and [t.seconds for t in choice.candidates] == [None, None]
    assert load_choices(home, device_name("cpu", threads=torch.get_num_threads())) == {}


def test_half_formats_may_not_be_worse_than_twice_plain_torch() -> None:
    def coarse(x: Tensor, scale: float) -> Tensor:
        return (x.float().square() * scale * 1.01).to(x.dtype)  # within 2e-2, but plain torch is within 2e-3

    (trial, _) = choose(an_op(Version(name="coarse", run=coarse)), replace(CASE, dtype="bf16")).candidates
    assert not trial.agreed and "allowed" in trial.refused


def test_nans_must_be_in_the_same_places() -> None:
    def with_nan(case: Row, generator: torch.Generator) -> tuple[Any, ...]:
        x, scale = inputs(case, generator)
        x[3] = float("nan")
        return x, scale

    def cleaned(x: Tensor, scale: float) -> Tensor:
        return quick(x, scale).nan_to_num()

    op = replace(an_op(QUICK, Version(name="cleaned", run=cleaned)), inputs=with_nan)
    trials = {trial.version: trial for trial in choose(op, CASE).candidates}
    assert trials["quick"].agreed and not trials["cleaned"].agreed


@pytest.mark.slow
def test_torch_compile_competes() -> None:
    choice = choose(an_op(compiled(quick)), CASE)
    assert choice.candidates[0].version == "compile" and (choice.candidates[0].agreed or choice.candidates[0].refused)


def test_what_is_hopeless_is_timed_by_one_call() -> None:
    calls = []

    def slow(x: Tensor, scale: float) -> Tensor:
        calls.append(1)
        time.sleep(3e-2)
        return quick(x, scale)

    trials = {trial.version: trial for trial in choose(an_op(QUICK, Version(name="slow", run=slow)), CASE).candidates}
    assert len(calls) == 3, "the check, a warm-up and one that counts"
    assert trials["slow"].agreed and trials["slow"].seconds > 4 * trials["quick"].seconds
