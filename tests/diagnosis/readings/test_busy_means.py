"""Busy means: what a page that was looked at too late still says about its load."""

from __future__ import annotations

import pytest

from armillary.diagnosis.readings.metrics_page import reading_of_page
from tests.diagnosis.data.make_vllm_pages import Case, pages

SGLANG = """sglang:num_running_reqs 0
sglang:num_queue_reqs 0
sglang:num_requests_total {requests}
sglang:time_to_first_token_seconds_sum {ttft}
sglang:time_to_first_token_seconds_count {requests}
sglang:e2e_request_latency_seconds_sum {e2e}
sglang:e2e_request_latency_seconds_count {requests}
sglang:queue_time_seconds_sum {queue}
sglang:queue_time_seconds_count {requests}
"""


def left(text: str) -> str:
    """The page as it would be a moment after everybody left."""
    gone = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")
    return "\n".join(line.rpartition(" ")[0] + " 0.0" if line.startswith(gone) else line for line in text.splitlines())


def test_a_batch_by_its_steps() -> None:
    text = next(pages(Case(clients=48, max_num_seqs=16), 20.0))
    now, late = (reading_of_page(page, source="x").values for page in (text, left(text)))
    assert late["running"] == pytest.approx(now["running"], rel=0.1) and now["running"] == 16
    assert late["waiting"] == pytest.approx(now["waiting"], rel=0.2)
    assert late["kv_used_fraction"] == pytest.approx(now["kv_used_fraction"], rel=0.2)


def test_those_who_are_there_go_before_any_mean() -> None:
    text = next(pages(Case(clients=48, max_num_seqs=16), 20.0))
    assert "unanswered" not in reading_of_page(text, source="x").values


def test_without_steps_by_what_was_answered_between_two_looks() -> None:
    """100 requests in 50 s, of 4 s in the batch after 6 s in the queue: 8 ran, 12 waited."""
    first = SGLANG.format(requests=0, ttft=0, e2e=0, queue=0)
    second = SGLANG.format(requests=100, ttft=650, e2e=1000, queue=600)
    values = reading_of_page(second, source="x", earlier=first, seconds=50.0).values
    assert (values["running"], values["waiting"]) == pytest.approx((8.0, 12.0))
    alone = reading_of_page(second, source="x").values
    assert alone["running"] == 0 and "unanswered" not in alone, "one look tells no rate"
