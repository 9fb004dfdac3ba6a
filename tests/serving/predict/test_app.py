"""The routes, in process: the plain form verbatim, errors in words, batching, new versions, metrics."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from armillary.serving.predict import app, json_workers
from armillary.serving.predict.app import PredictServer, make_app
from armillary.serving.predict.trusted_files import FileTrust
from armillary.spec.tables.serve import Predict
from armillary.store.home import Home
from tests.serving.predict.asgi import Client, running

Files = dict[str, Path]
ROW = {"features": [1, 2, 3, 4]}


def serving(path: Path, scenario: Callable[[Client, PredictServer], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        made = Predict(**{"reload_s": 0.02, "max_delay_s": 0.01} | settings)
        state = PredictServer(path, made, trust=FileTrust(Home.at(path.parent), every_file=True))
        async with running(make_app(state)) as client:
            return await scenario(client, state)

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_the_plain_form_verbatim(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        before = (await client.get("/health")).json
        assert before == {"status": "healthy", "model_loaded": True, "avg_latency_ms": 0.0}
        found = await client.post("/predict", ROW)
        assert found.code == 200 and set(found.json) == {"prediction", "latency_ms"}
        assert found.json["prediction"] == [10.0, 11.0] and found.json["latency_ms"] > 0
        assert (await client.post("/predict", {"features": [[1, 2, 3, 4]] * 2})).json["prediction"] == [[10, 11]] * 2
        assert (await client.get("/health")).json["avg_latency_ms"] > 0
        assert (await client.get("/ready")).code == 200

    serving(files["one"], scenario)


def test_requests_that_come_together_are_run_together(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> str:
        rows = [{"features": [i, 0, 0, 0]} for i in range(64)]
        found = await asyncio.gather(*(client.post("/predict", row) for row in rows))
        assert [one.json["prediction"] for one in found] == [[i, i + 1] for i in range(64)]
        return (await client.get("/metrics")).body.decode()

    text = serving(files["one"], scenario, max_batch=16)
    assert "armillary_predict_batch_rows_count 4.0" in text
    assert 'armillary_predict_requests_total{code="200"} 64.0' in text


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"features": [1, 2]}, 422, "want a row of shape [4]"),
        (b"not json", 422, "not JSON"),
        ({"features": ["x"] * 4}, 422, "want numbers"),
        ({"features": [[0] * 4] * 100}, 422, "send from 1 to 50"),
        (b" " * 2001, 413, "larger than 2,000 bytes"),
    ],
)
def test_bad_requests_are_told_why(files: Files, body: Any, code: int, words: str) -> None:
    async def scenario(client: Client, state: PredictServer) -> Any:
        return await client.post("/predict", body)

    found = serving(files["one"], scenario, max_body_bytes=2000, max_queue=50)
    assert found.code == code and words in found.json["error"]


def test_overload_is_refused_and_late_answers_are_given_up(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        found = await asyncio.gather(*(client.post("/predict", ROW) for _ in range(9)))
        assert sorted(one.code for one in found) == [200] * 4 + [429] * 5
        assert {one.headers.get("retry-after") for one in found if one.code == 429} == {"1"}

    serving(files["one"], scenario, max_queue=4)

    async def late(client: Client, state: PredictServer) -> Any:
        return await client.post("/predict", ROW)

    assert serving(files["one"], late, max_delay_s=5.0, timeout_s=0.05).code == 504


def test_a_body_that_does_not_end_is_given_up(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> Any:
        return await client.send("POST", "/predict", b'{"features": [1, 2', endless=True)

    assert serving(files["one"], scenario, timeout_s=0.05).code == 408


def test_large_requests_and_answers_are_read_and_written_elsewhere(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON of megabytes holds the interpreter for as long as it takes: this process must not be at it."""
    rows = [[i, 0.5, 1e-3, -7] for i in range(8000)]

    def at_the_door(*given: Any, **more: Any) -> Any:
        raise AssertionError("read or written in the process that answers /health")

    async def scenario(client: Client, state: PredictServer) -> None:
        small = (await client.post("/predict", {"features": rows[:3]})).json["prediction"]
        for name in ("parse", "read", "response_table"):
            monkeypatch.setattr(json_workers, name, at_the_door)
        found = await client.post("/predict", {"features": rows})
        assert found.code == 200 and set(found.json) == {"prediction", "latency_ms"}
        assert len(found.json["prediction"]) == 8000 and found.json["prediction"][:3] == small
        wrong = await client.post("/predict", {"features": [*rows, [1, 2, 3, "x"]]})
        assert wrong.code == 422 and "want numbers" in wrong.json["error"]
        on_the_spot = await client.post("/predict", {"features": rows[:3]})
        assert "read or written in the process" in on_the_spot.json["error"]  # small ones are

    serving(files["one"], scenario, max_queue=10_000, max_delay_s=0.0)


def test_a_reader_that_dies_costs_one_request(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> list[int]:
        rows = {"features": [[1, 2, 3, 4]] * 8000}
        codes = [(await client.post("/predict", rows)).code]
        for pid in [worker.pid for worker in state._json_pool.workers if worker.pid]:
            os.kill(pid, signal.SIGKILL)
        return codes + [(await client.post("/predict", rows)).code for _ in range(4)]

    first, *rest = serving(files["one"], scenario, max_queue=10_000, max_delay_s=0.0)
    assert first == 200 and rest[-1] == 200 and set(rest) <= {200, 503} and rest.count(200) >= 2


def test_bodies_have_room_together(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_BODIES", 2)
    text = json.dumps(ROW).encode()
    text += b" " * (2000 - len(text))

    async def scenario(client: Client, state: PredictServer) -> None:
        waiting, rest = asyncio.Event(), asyncio.get_running_loop().create_future()

        async def later() -> bytes:
            waiting.set()
            await rest
            return text[1999:]

        slow = asyncio.create_task(client.send("POST", "/predict", text[:1999], rest=later()))
        await waiting.wait()
        assert (await client.post("/predict", text)).code == 200
        both = [asyncio.create_task(client.send("POST", "/predict", text, endless=True)) for _ in range(2)]
        await _until(lambda: any(one.done() for one in both))
        refused = next(one for one in both if one.done()).result()
        assert refused.code == 429 and refused.headers["retry-after"] == "1" and "bodies" in refused.json["error"]
        rest.set_result(None)
        assert (await slow).code == 200
        assert sorted([one.code for one in await asyncio.gather(*both)]) == [408, 429]
        assert (await client.post("/predict", text)).code == 200  # what was refused or given up has left

    serving(files["one"], scenario, max_body_bytes=2000, timeout_s=1.0)


def test_models_with_several_inputs_and_without_rows(files: Files) -> None:
    async def named(client: Client, state: PredictServer) -> Any:
        return await client.post("/predict", {"inputs": {"x": [1, 2, 3, 4], "keep": [1, 0, 0, 1]}})

    assert serving(files["named"], named).json["outputs"] == {"kept": [1, 0, 0, 4], "total": 5}

    async def whole(client: Client, state: PredictServer) -> Any:
        both = [client.post("/predict", {"features": [[0, 0, 0, 0], [2, 2, 2, i]]}) for i in (2, 4)]
        return [one.json["prediction"] for one in await asyncio.gather(*both)]

    assert serving(files["mixing"], whole) == [[[-1, -1, -1, -1], [1, 1, 1, 1]], [[-1, -1, -1, -2], [1, 1, 1, 2]]]


def test_a_shapeless_model_refuses_in_its_own_words(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> list[Any]:
        return [await client.post("/predict", {"features": features}) for features in ([1, 2, 3, 4], [1, 2, 3])]

    good, bad = serving(files["shapeless"], scenario)
    assert good.json["prediction"] == [10, 11] and bad.code == 422 and "the model failed" in bad.json["error"]


def test_values_that_no_schema_can_tell_fail_alone(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> list[Any]:
        rows = [[1, 2, 3], [1, 2, 10], [4, 5, 6]]
        return await asyncio.gather(*(client.post("/predict", {"features": row}) for row in rows))

    found = serving(files["names"], scenario)
    assert [one.code for one in found] == [200, 422, 200] and "out of range" in found[1].json["error"]


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.01)


def test_a_new_version_takes_over_and_no_request_is_lost(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    shutil.copy(files["one"], path)

    async def scenario(client: Client, state: PredictServer) -> None:
        codes: list[int] = []
        answers: set[float] = set()

        async def keep_asking() -> None:
            while 20.0 not in answers:
                found = await client.post("/predict", ROW)
                codes.append(found.code)
                answers.add(found.json["prediction"][0])

        asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
        await asyncio.sleep(0.05)
        shutil.copy(files["two"], tmp_path / "next")
        os.replace(tmp_path / "next", path)
        await asyncio.gather(*asking)
        assert set(codes) == {200} and answers == {10.0, 20.0}
        assert (await client.post("/predict", ROW)).json["prediction"] == [20.0, 21.0]

    serving(path, scenario)


def test_a_request_whose_body_outlasts_its_version_is_answered_by_the_next(files: Files, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    shutil.copy(files["one"], tmp_path / "1" / "model.pt2")

    async def scenario(client: Client, state: PredictServer) -> Any:
        assert (await client.post("/predict", ROW)).headers["x-model-version"] == "1"

        async def rest() -> bytes:
            (tmp_path / "2").mkdir()
            shutil.copy(files["two"], tmp_path / "2" / "model.pt2")
            await _until(lambda: state.models.reloads == 1 and not state.models._closing)
            return b", 3, 4]}"

        return await client.send("POST", "/predict", b'{"features": [1, 2', rest=rest())

    found = serving(tmp_path, scenario, timeout_s=10.0)
    assert found.code == 200 and found.json["prediction"] == [20.0, 21.0] and found.headers["x-model-version"] == "2"


def test_a_broken_version_is_refused_and_the_old_one_stays(files: Files, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    shutil.copy(files["one"], tmp_path / "1" / "model.pt2")

    async def scenario(client: Client, state: PredictServer) -> None:
        (tmp_path / "2").mkdir()
        shutil.copy(files["broken"], tmp_path / "2" / "model.pt2")
        await _until(lambda: bool(state.models.problem))
        assert (await client.post("/predict", ROW)).json["prediction"] == [10.0, 11.0]
        assert "version 2" in (await client.get("/ready")).json["reload_problem"]
        (tmp_path / "3").mkdir()
        shutil.copy(files["two"], tmp_path / "3" / "model.pt2")
        await _until(lambda: state.models.reloads == 1)
        found = await client.post("/predict", ROW)
        assert found.json["prediction"] == [20.0, 21.0] and found.headers["x-model-version"] == "3"
        page = (await client.get("/metrics")).body.decode()
        assert "# TYPE armillary_predict_reloads_total counter" in page
        assert "\narmillary_predict_reloads_total 1.0\n" in page

    serving(tmp_path, scenario)


def test_other_paths_and_methods_are_answered_in_words(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> list[Any]:
        return [await client.get("/predict"), await client.get("/nowhere")]

    method, path = serving(files["one"], scenario)
    assert method.code == 405 and path.code == 404 and "POST /predict" in path.json["error"]


def test_schema_and_openapi(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> tuple[Any, Any]:
        return (await client.get("/schema")).json, (await client.get("/openapi.json")).json

    schema, openapi = serving(files["one"], scenario, max_batch=100, preferred=(8,))
    assert schema["inputs"] == [{"name": "input", "dtype": "float32", "shape": [None, 4]}]
    assert schema["max_batch"] == 64 and schema["preferred"] == [8]  # the file takes no more
    forms = openapi["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]["oneOf"]
    assert forms[0]["properties"]["features"]["oneOf"][0]["minItems"] == 4
