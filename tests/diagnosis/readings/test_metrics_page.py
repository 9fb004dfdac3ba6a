"""Metrics pages as Readings: vLLM's from recorded files, two looks at a live one, other servers, our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from armillary.diagnosis.readings.metrics_page import is_page, page_url, read_metrics, reading_of_page
from armillary.errors import BadData, NotFound
from armillary.store.home import Home

DATA = Path(__file__).parents[1] / "data"
KV_FULL = DATA / "synthetic_vllm_kv_full.prom"
Cli = Callable[..., Any]


@contextmanager
def serving(*pages: str) -> Iterator[str]:
    """A server whose /metrics gives one page after the other, the last for ever."""
    left = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *words: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_recorded_page_of_vllm() -> None:
    reading = read_metrics(str(KV_FULL))
    assert (reading.kind, reading.by, reading.steps) == ("serving", "vllm", ())
    assert reading.values["running"] + reading.values["waiting"] == 256, "its clients"
    assert reading.values["kv_used_fraction"] > 0.99 and reading.values["kv_capacity_tokens"] == 3000 * 16
    parts = sum(reading.values[name] for name in ("queue_s", "prefill_s", "decode_s"))
    assert parts == pytest.approx(reading.values["e2e_s"], rel=1e-6)
    assert reading.values["itl_p50_s"] < reading.values["itl_p99_s"] < reading.values["ttft_p50_s"]
    assert reading.settings["gpu_memory_utilization"] == "0.9" and reading.settings["models"].startswith("meta-llama/")
    assert reading.values["prefix_hit_fraction"] == 0 and "requests_per_s" not in reading.values


def test_a_real_page_of_vllm() -> None:
    """One user with long prompts, most of them found in the prefix cache; tokens are drafted."""
    reading = read_metrics(str(DATA / "vllm_2026_one_user.prom"))
    values = reading.values
    assert values["prefix_hit_fraction"] == pytest.approx(0.882, abs=1e-3) and values["requests_total"] == 26
    assert values["queue_s"] < 1e-3 and values["prefill_s"] == pytest.approx(15.65, abs=0.01)
    assert values["itl_p50_s"] == pytest.approx(0.0832, abs=1e-4) and values["ttft_p50_s"] < 2.5
    assert values["kv_capacity_tokens"] == 1428520, "what it says itself goes before blocks times their size"


def test_names_of_the_engine_before_v1() -> None:
    text = KV_FULL.read_text().replace('engine="0",', "").replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    later = ("prefix_cache_", "iteration_tokens")
    old = "\n".join(line for line in text.splitlines() if not any(word in line for word in later))
    reading = reading_of_page(old + '\nvllm:num_requests_swapped{model_name="m"} 0.0\n', source="x")
    now = reading_of_page(KV_FULL.read_text(), source="x")
    shared = ("running", "waiting", "kv_used_fraction", "ttft_p99_s", "itl_p99_s", "e2e_s", "queue_s", "tokens_out")
    assert {name: reading.values[name] for name in shared} == {name: now.values[name] for name in shared}


def test_names_of_other_versions_are_read_alike() -> None:
    text = KV_FULL.read_text()
    older = text.replace("kv_cache_usage_perc", "gpu_cache_usage_perc").replace("vllm:prefix_", "vllm:gpu_prefix_")
    newer = text.replace("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds")
    values = reading_of_page(text, source="x").values
    assert reading_of_page(older, source="x").values == values == reading_of_page(newer, source="x").values


def test_engines_of_one_server_are_taken_together() -> None:
    text = KV_FULL.read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    both = text + "\n".join(line.replace('engine="0"', 'engine="1"') for line in lines) + "\n"
    one, two = (reading_of_page(page, source="x").values for page in (text, both))
    assert two["replicas"] == 2 and two["running"] == 2 * one["running"]
    assert two["kv_used_fraction"] == one["kv_used_fraction"]
    assert two["kv_capacity_tokens"] == 2 * one["kv_capacity_tokens"] and two["ttft_p99_s"] == one["ttft_p99_s"]


def test_a_url_is_looked_at_twice_for_rates() -> None:
    first = KV_FULL.read_text()
    finished = next(line for line in first.splitlines() if "request_success_total" in line and '"length"' in line)
    name, _, count = finished.rpartition(" ")
    second = first.replace(finished, f"{name} {float(count) + 50}")
    waited: list[float] = []
    with serving(first, second) as url:
        reading = read_metrics(url + "/v1", apart_s=2.0, wait=waited.append)
    assert waited == [2.0] and reading.source == url + "/v1"
    assert reading.values["requests_per_s"] > 0 and reading.values["tokens_out_per_s"] == 0
    assert any("looked at twice" in note for note in reading.notes)


def test_a_server_that_started_again_in_between_is_read_as_it_is_now() -> None:
    reading = reading_of_page(
        (DATA / "synthetic_vllm_healthy.prom").read_text(), source="x", earlier=KV_FULL.read_text(), seconds=5.0
    )
    assert "requests_per_s" not in reading.values and reading.values["preemptions_total"] == 0
    assert reading.notes[0].startswith("the server restarted between the two looks")


def test_addresses_lead_to_the_page() -> None:
    wanted = "http://host:8000/metrics"
    assert {page_url(f"http://host:8000{path}") for path in ("", "/", "/v1", "/v1/", "/metrics")} == {wanted}
    assert page_url("https://host/engine/metrics") == "https://host/engine/metrics"


SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 30.0
sglang:num_running_reqs{model_name="m",tp_rank="1"} 30.0
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 90.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.3
sglang:max_total_num_tokens{model_name="m",tp_rank="0"} 400000.0
sglang:cache_hit_rate{model_name="m",tp_rank="0"} 0.25
sglang:generation_tokens_total{model_name="m"} 20000.0
sglang:prompt_tokens_total{model_name="m"} 50000.0
sglang:num_requests_total{model_name="m"} 100.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 855.0
sglang:time_to_first_token_seconds_bucket{le="10.0",model_name="m"} 60.0
sglang:time_to_first_token_seconds_bucket{le="20.0",model_name="m"} 100.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 100.0
sglang:time_to_first_token_seconds_count{model_name="m"} 100.0
sglang:inter_token_latency_seconds_sum{model_name="m"} 400.0
sglang:inter_token_latency_seconds_bucket{le="0.03",model_name="m"} 20000.0
sglang:inter_token_latency_seconds_bucket{le="+Inf",model_name="m"} 20000.0
sglang:inter_token_latency_seconds_count{model_name="m"} 20000.0
sglang:queue_time_seconds_sum{model_name="m"} 850.0
sglang:queue_time_seconds_bucket{le="+Inf",model_name="m"} 100.0
sglang:queue_time_seconds_count{model_name="m"} 100.0
"""

TGI = """tgi_batch_current_size 8
tgi_queue_size 40
tgi_request_success{kind="ok"} 500
tgi_request_duration_sum 6000
tgi_request_duration_count 500
tgi_request_queue_duration_sum 4000
tgi_request_queue_duration_count 500
tgi_request_mean_time_per_token_duration_sum 20
tgi_request_mean_time_per_token_duration_count 500
tgi_request_generated_tokens_sum 50000
tgi_request_generated_tokens_count 500
"""


def test_other_servers(tmp_path: Path) -> None:
    sglang = reading_of_page(SGLANG, source="x")
    assert sglang.by == "sglang" and sglang.values["running"] == 30 and sglang.values["queue_s"] == 8.5
    assert sglang.values["kv_capacity_tokens"] == 400_000 and sglang.values["itl_s"] == 0.02
    tgi = reading_of_page(TGI, source="x")
    assert (tgi.by, tgi.values["waiting"], tgi.values["tpot_s"]) == ("tgi", 40, 0.04)
    page = tmp_path / "page.txt"
    page.write_text(SGLANG)
    assert is_page(page) and not is_page(tmp_path / "none")


def test_our_own_page() -> None:
    from armillary.serving.processes.server_metrics import Metrics

    metrics = Metrics()
    metrics.engine_state = {"running": 4.0, "waiting": 2.0, "kv_used_fraction": 0.5, "preemptions_total": 3.0}
    for seconds in (0.02, 0.03, 0.3):
        metrics.histograms["itl_s"].observe(seconds)
    reading = reading_of_page(metrics.page().decode(), source="x")
    assert reading.by == "armillary"
    assert (reading.values["running"], reading.values["waiting"], reading.values["preemptions_total"]) == (4, 2, 3)
    assert reading.values["itl_s"] == pytest.approx(0.35 / 3) and reading.values["itl_p50_s"] < 0.05


def test_our_page_with_vllms_names_reads_the_same_as_either_server() -> None:
    from armillary.serving.processes.server_metrics import Metrics

    metrics = Metrics(vllm=True)
    metrics.info = {"model": "bot", "block_tokens": "16"}
    metrics.engine_state = {"running": 4.0, "waiting": 2.0, "kv_used_fraction": 0.5, "kv_capacity_tokens": 1600.0}
    metrics.engine_state |= {"tokens_out_total": 30.0, "prefix_queries_total": 10.0, "prefix_hits_total": 5.0}
    metrics.finished.update({"stop": 2, "tool_calls": 1, "length": 4})
    for name in metrics.histograms:
        metrics.histograms[name].observe(0.02)
    page = metrics.page().decode()
    ours = reading_of_page(page, source="x")
    theirs = reading_of_page("\n".join(line for line in page.split("\n") if "armillary_" not in line), source="x")
    assert (ours.by, theirs.by) == ("armillary", "vllm")
    names = (
        "running",
        "waiting",
        "kv_used_fraction",
        "tokens_out_total",
        "ttft_s",
        "itl_s",
        "e2e_s",
        "queue_s",
        "tokens_in",
    )
    assert {name: ours.values[name] for name in names} == {name: theirs.values[name] for name in names}
    assert theirs.values["requests_total"] == 7 and 'vllm:num_requests_waiting{engine="0",model_name="bot"} 2.0' in page
    assert 'num_gpu_blocks="100"' in page


def test_a_server_of_ours_leads_to_its_run(home: Home, cli: Cli) -> None:
    from tests.diagnosis.trained import plan_of, run_of

    run = run_of(home, plan_of(), name="calm-finch", data_wait_s=0.5)
    page = f'armillary_serve_info{{run="{run.name}",model="m"}} 1.0\narmillary_running 0.0\n'
    with serving(page) as url:
        ran = cli("diagnose", url, "--json")
    assert ran.json["cause"] == "data_starvation", "what that run measured, rather than what the page has"
    assert any("calm-finch" in note for note in ran.json["notes"])


def test_what_is_no_page_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no metrics page of a server known here; give one of armillary, vllm"):
        reading_of_page("go_goroutines 8\n", source="x")
    with pytest.raises(NotFound, match="curl"):
        read_metrics(str(tmp_path / "none"))
    with pytest.raises(NotFound, match=r"no metrics page at http://127\.0\.0\.1:9/metrics"):
        read_metrics("http://127.0.0.1:9")
    with serving("hello\n") as url, pytest.raises(BadData, match="no metrics page"):
        read_metrics(url, wait=lambda _: None)


@pytest.mark.parametrize("of", ["armillary_running 3\n", "armillary_gateway_in_flight 3\n"])
def test_missed_safety_slos_are_noted_of_every_kind_of_page(of: str) -> None:
    guards = "armillary_guard_s {took}\narmillary_guard_limit_s 0.2\n"
    missed = reading_of_page(of + guards.format(took=0.5), source="x").notes
    assert any(note.startswith("safety SLO: ") and "above its limit of 0.2" in note for note in missed)
    met = reading_of_page(of + guards.format(took=0.1), source="x").notes
    assert not any(note.startswith("safety SLO") for note in met)
