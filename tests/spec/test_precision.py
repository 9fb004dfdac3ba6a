"""The rule behind "auto": dtypes from rates, whatever the machine is called."""

from __future__ import annotations

import pytest

from armillary.errors import BadRecipe
from armillary.spec.precision import DtypeRate, DtypeRates, check_asked, serving_dtype, training_dtype

TRAFFIC = {"tokens_in": 512.0, "tokens_out": 128.0}


def rates(**by_dtype: DtypeRate) -> DtypeRates:
    wide = DtypeRate(gemm=100.0, attention=50.0, decode=10.0)
    return DtypeRates(by_dtype={"fp32": wide, **by_dtype}, source="made up")


WITH_UNITS = rates(bf16=DtypeRate(gemm=300.0, attention=80.0, decode=18.0))
WITHOUT = rates(bf16=DtypeRate(gemm=0.3, emulated=True), fp16=DtypeRate(gemm=0.2, emulated=True))


def test_16_bits_where_gemm_and_attention_both_gain() -> None:
    made = training_dtype(WITH_UNITS)
    assert made.dtype == "bf16" and "GEMM 3 × and attention 1.6 ×" in made.reason and "made up" in made.reason


@pytest.mark.parametrize(
    "half",
    [
        DtypeRate(gemm=114.0, attention=200.0),
        DtypeRate(gemm=300.0, attention=57.0),
        DtypeRate(gemm=90.0),
    ],
)
def test_a_gain_below_the_bar_in_either_is_not_worth_it(half: DtypeRate) -> None:
    made = training_dtype(rates(bf16=half))
    assert made.dtype == "fp32" and "gains too little" in made.reason


def test_an_emulated_format_is_never_taken_and_said_so() -> None:
    made = training_dtype(WITHOUT)
    assert made.dtype == "fp32" and "bf16 and fp16 are emulated here, GEMM 0.003 ×" in made.reason


def test_fp16_where_only_bf16_is_emulated() -> None:
    found = rates(bf16=DtypeRate(gemm=1.0, emulated=True), fp16=DtypeRate(gemm=200.0, attention=100.0, decode=20.0))
    assert training_dtype(found).dtype == "fp16"
    assert serving_dtype(found, stored="fp32", **TRAFFIC).dtype == "fp16"
    assert serving_dtype(found, stored="bf16", **TRAFFIC).dtype == "fp32", "fp16 would change bf16 weights"


def test_a_server_weighs_bytes_against_flops_by_its_traffic() -> None:
    """A format that is slow in GEMM and reads half the bytes: for long answers, not for long prompts."""
    found = rates(bf16=DtypeRate(gemm=80.0, decode=20.0))
    assert serving_dtype(found, stored="bf16", tokens_in=32, tokens_out=1024).dtype == "bf16"
    assert serving_dtype(found, stored="bf16", tokens_in=8192, tokens_out=16).dtype == "fp32"


def test_a_16_bit_checkpoint_is_served_in_fp32_where_its_format_is_emulated() -> None:
    assert serving_dtype(WITHOUT, stored="bf16", **TRAFFIC).dtype == "fp32"
    assert serving_dtype(WITH_UNITS, stored="bf16", **TRAFFIC).dtype == "bf16"
    assert serving_dtype(WITH_UNITS, stored="fp32", **TRAFFIC).dtype == "bf16"


def test_what_is_asked_for_is_warned_of_at_twice_and_refused_at_ten_times() -> None:
    key = "layout.precision"
    assert check_asked("bf16", WITH_UNITS, key) == ""
    assert check_asked("fp8", WITHOUT, key) == check_asked("fp32", WITHOUT, key) == ""
    said = check_asked("bf16", rates(bf16=DtypeRate(gemm=20.0, emulated=True)), key)
    assert "5 × slower" in said and "--set layout.precision=auto" in said
    with pytest.raises(BadRecipe, match=r"bf16 \(emulated\) is 333 × slower .* --set layout.precision=fp32"):
        check_asked("bf16", WITHOUT, key)
