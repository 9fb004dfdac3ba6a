from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import save_model
from armillary.planning.device_model.efficiency import TORCH_CALL_S
from armillary.planning.serving.queueing import Server
from armillary.planning.serving.replica import Replica
from armillary.planning.simulation.simulated_engine import planned_service
from armillary.spec import catalogue
from armillary.spec.tables.serve import Serve
from armillary.spec.tables.traffic import Traffic
from tests.model.layers.test_attention_forms import small

TRAFFIC = Traffic(requests_per_s=6, tokens_in=32, tokens_out=64, duration_s=10)


def server_of(on: str, rows: int) -> Server:
    replica = Replica(config=catalogue.model("armillary-5m").config, cluster=catalogue.cluster(on))
    return Server(replica=replica, serve=Serve(max_running=rows), traffic=TRAFFIC)


def test_few_rows_make_requests_wait() -> None:
    few, many = (planned_service(server_of("cpu", rows), 20_000) for rows in (1, 32))
    assert few["queue_p50_s"] > 10 * many["queue_p50_s"] and few["ttft_p99_s"] > many["ttft_p99_s"]
    assert few["itl_p50_s"] <= many["itl_p50_s"], "and those that run are less in each other's way"


def test_blocks_that_are_few_do_too() -> None:
    few, many = (planned_service(server_of("cpu", 32), tokens) for tokens in (130, 20_000))
    assert few["queue_p50_s"] > many["queue_p50_s"]


def test_a_processor_pays_for_its_calls() -> None:
    one, eight = (server_of("cpu", 8).replica.decode(rows, 64) for rows in (1, 8))
    assert one.host_s > 500 * TORCH_CALL_S and eight.host_s > one.host_s
    assert server_of("h100", 8).replica.decode(1, 64).host_s == 0, "a graph is one launch"


class Calls(TorchDispatchMode):
    """Counts them."""

    count = 0

    def __torch_dispatch__(self, call: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return call(*args, **(kwargs or {}))


@pytest.mark.parametrize(("layers", "rows"), [(2, 1), (2, 4), (6, 2)])
def test_calls_of_a_step_are_what_the_engine_makes(layers: int, rows: int, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 20, 300)
    tokenizer.save(tmp_path / "tokenizer")
    config = small(vocab=tokenizer.vocab_size, num_layers=layers)
    folder = save_model(
        build(config, dtype=torch.float32, device="cpu", seed=3), tmp_path / "m", template=tmp_path / "tokenizer"
    )
    made = {}
    for tokens in (4, 12):
        llm = LLM(folder, Serve(block_tokens=4, kv_bytes=100_000), device="cpu")
        with Calls() as calls:
            llm.generate([[5, 6, 7]] * rows, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8))
        made[tokens] = calls.count
        llm.close()
    planned = Replica(config=config, cluster=catalogue.cluster("cpu")).decode(rows, 8).host_s / TORCH_CALL_S
    assert (made[12] - made[4]) / 8 == pytest.approx(planned, rel=0.2)
