"""What goes wrong out of sight: a compiler that fails, a process that cannot be started, a list that is too long."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from armillary.serving.api import engine_process
from armillary.serving.api.channel import Orders, Refused, Started, Submit, frame
from armillary.serving.api.completions import complete
from armillary.serving.api.engine_main import Intake
from armillary.serving.api.engine_process import EngineProcess
from armillary.serving.api.lines import to_whom_it_concerns
from armillary.serving.api.metrics import Metrics
from armillary.serving.api.problem import Problem
from armillary.serving.api.schemas import Completion
from armillary.serving.engine.constraint import Structure
from armillary.serving.engine.params import SamplingParams
from armillary.spec.service import Serve
from armillary.store.home import Home

STARTED = Started(max_model_len=8, vocab=8, kv_tokens=8, kv_text="", phases=[("in all", 0.1)])


def test_a_request_whose_structure_breaks_the_compiler_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def broken() -> Any:
        raise ValueError("the compiler's own")

    sent: list[Any] = []
    llm: Any = SimpleNamespace(structures=SimpleNamespace(maker=lambda structure: broken))
    outlet: Any = SimpleNamespace(send=sent.append)
    intake = Intake(llm, SimpleNamespace(), outlet)  # type: ignore[arg-type]
    params = SamplingParams(structure=Structure(kind="regex", source="a+"))
    intake.take(Submit(number=7, prompt=b"", params=params, timeout_s=None))
    intake._compilers.shutdown(wait=True)
    (told,) = sent
    assert isinstance(told, Refused) and told.number == 7 and "make it simpler" in told.message
    assert "the compiler's own" in capfd.readouterr().err


class FewProcesses:
    """Stands in for the engine's processes: the first is lost, the second cannot be started, the third stays."""

    alive = True

    def __init__(self) -> None:
        self.starts = 0

    async def start(self, orders: Orders) -> asyncio.StreamReader:
        self.starts += 1
        if self.starts == 2:
            raise OSError(12, "Cannot allocate memory")
        reader = asyncio.StreamReader()
        reader.feed_data(frame(STARTED))
        if self.starts == 1:
            reader.feed_eof()
        return reader

    def lost_one(self) -> bool:
        return False

    async def end(self) -> int:
        return -9


def test_an_engine_that_cannot_be_started_again_at_once_is_started_later(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_BACKOFF_S", (0.0,))
    said: list[str] = []

    async def live() -> tuple[int, str]:
        orders = Orders(model="m", serve=Serve(), home=Home(work=tmp_path, cache=tmp_path))
        engine = EngineProcess(orders, ranks=1, metrics=Metrics(), say=said.append)
        ranks = FewProcesses()
        engine._ranks = ranks  # type: ignore[assignment]
        await engine.start()
        async with asyncio.timeout(20):
            while ranks.starts < 3 or engine.state != "ready":
                await asyncio.sleep(0.01)
        found = ranks.starts, engine.state
        await engine.stop()
        return found

    assert asyncio.run(live()) == (3, "ready")
    assert any("Cannot allocate memory" in line for line in said)


def test_a_line_that_nobody_reads_is_lost_and_nothing_else() -> None:
    said: list[str] = []

    def into_a_closed_pipe(text: str) -> None:
        said.append(text)
        raise BrokenPipeError

    to_whom_it_concerns(into_a_closed_pipe)("the engine ended")
    assert said == ["the engine ended"]


def test_a_list_of_too_many_prompts_is_refused_unread() -> None:
    async def encode(*words: Any, **more: Any) -> list[int]:
        raise AssertionError("it was read")

    served: Any = SimpleNamespace(texts=SimpleNamespace(encode=encode), max_model_len=8)
    with pytest.raises(Problem, match="more than 1,024 answers"):
        asyncio.run(complete(served, Completion(prompt=["a"] * 1025), 0.0))
