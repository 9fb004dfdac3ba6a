"""The KV cache takes what serve.memory_fraction leaves when weights in their last form and the largest step are in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armillary.engine.build import make_engine
from armillary.engine.runner import kv_memory_budget as kv_budget
from armillary.engine.runner.kv_memory_budget import step_bytes
from armillary.errors import BadInput, BadRecipe
from armillary.model.transformer import build
from armillary.spec.tables.serve import Serve
from tests.engine.fake import ask
from tests.model.layers.test_attention_forms import small

GB = 5e7
CONFIG = small(context=2048, vocab=500)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """200 MB by the control group, of which this process holds 50 and others 25."""
    given = {"limit": 4 * GB, "available": 2.5 * GB, "own": 1 * GB}
    for name, key in (("limit_bytes", "limit"), ("available_bytes", "available"), ("resident_bytes", "own")):
        monkeypatch.setattr(kv_budget, name, lambda key=key: given[key])
    return given


def made(**fields: Any) -> Any:
    model = build(CONFIG, dtype=torch.float32, device="cpu", seed=3)
    return make_engine(model, None, Serve(**{"max_running": 512, "max_tokens_per_step": 512} | fields), seed=0)


@pytest.mark.parametrize("fraction", [0.5, 0.8])
def test_the_fraction_is_of_all_that_this_process_may_use(machine: dict[str, float], fraction: float) -> None:
    _, plan = made(memory_fraction=fraction)
    step = step_bytes(CONFIG, 512, 512, 4)
    assert plan.budget_bytes == int(fraction * 3.5 * GB - (1 * GB + step))
    machine["available"] = 10 * GB  # the machine has more; the control group counts
    assert made(memory_fraction=fraction)[1].budget_bytes == int(fraction * 4 * GB - (1 * GB + step))


def test_larger_steps_leave_less(machine: dict[str, float]) -> None:
    large, small_ones = made(max_tokens_per_step=8192, max_running=256), made(max_running=256)
    assert large[1].budget_bytes < small_ones[1].budget_bytes


def test_bytes_that_were_given_count_and_so_does_what_a_full_batch_can_use(machine: dict[str, float]) -> None:
    assert made(kv_bytes=10_000_000)[1].budget_bytes == 10_000_000
    _, plan = made(max_running=2, max_tokens_per_step=64)
    assert plan.num_blocks == 2 * 2048 // 16 + 1


def test_no_place_is_one_line_with_the_next_step(machine: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=r"raise serve\.memory_fraction"):
        made(memory_fraction=0.2)
    with pytest.raises(BadRecipe, match="memory_fraction"):
        Serve(memory_fraction=1.2)


def test_answers_come_out_of_blocks_that_came_last(machine: dict[str, float]) -> None:
    engine, plan = made(max_running=4, max_tokens_per_step=64)
    assert engine.loop.executor.rows.blocks.shape[1] == plan.num_blocks == engine.scheduler.cache.pool.num_blocks
    given, _ = made(max_running=4, max_tokens_per_step=64, kv_bytes=4_000_000)
    wanted = [ask(f"r{i}", [2 + i, 3, 4] * 9, 12, temperature=0.0) for i in range(3)]
    assert [one.tokens for one in engine.generate(wanted)] == [one.tokens for one in given.generate(wanted)]


@pytest.mark.gpu
@pytest.mark.parametrize("fraction", [0.4, 0.8])
def test_a_gpu_is_filled_to_the_fraction_and_no_further(fraction: float) -> None:
    """Graphs captured, a full step run, and log-probabilities of everybody besides."""
    config = small(hidden=1024, heads=16, kv_heads=8, head_dim=64, ffn=4096, vocab=50_000, num_layers=32, context=8192)
    model = build(config, dtype=torch.bfloat16, device="cuda", seed=3)
    engine, _ = make_engine(model, None, Serve(max_running=256, memory_fraction=fraction, max_tokens_per_step=4096))
    engine.generate([ask(f"r{i}", [2 + i % 9, 3, 4, 5] * 100, 4, logprobs=2) for i in range(256)])
    free, total = torch.cuda.mem_get_info()
    assert fraction - 0.05 < 1 - free / total < fraction + 0.03
    del engine
    torch.cuda.empty_cache()
