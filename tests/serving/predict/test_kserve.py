"""KServe's open inference protocol: the same model, in other words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from armillary.serving.predict.app import PredictServer
from tests.serving.predict.asgi import Client
from tests.serving.predict.test_app import serving

Files = dict[str, Path]


def tensor(data: Any, shape: list[int], name: str = "input", datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def test_a_model_is_described_and_run(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        assert [(await client.get(f"/v2/health/{kind}")).json for kind in ("live", "ready")] == [
            {"live": True},
            {"ready": True},
        ]
        assert set((await client.get("/v2")).json) == {"name", "version", "extensions"}
        model = (await client.get("/v2/models/one")).json
        (known,), (out,) = model["inputs"], model["outputs"]
        assert (known["datatype"], known["shape"], out["shape"]) == ("FP32", [-1, 4], [-1, 2])
        name, version = known["name"], model["versions"][0]
        for data in ([1, 2, 3, 4, 5, 6, 7, 8], [[1, 2, 3, 4], [5, 6, 7, 8]]):  # flat or nested
            body = {"id": "a-7", "inputs": [tensor(data, [2, 4], name)]}
            for path in ("/v2/models/one/infer", f"/v2/models/one/versions/{version}/infer"):
                found = (await client.post(path, body)).json
                assert found == {
                    "model_name": "one",
                    "model_version": version,
                    "id": "a-7",
                    "outputs": [{"name": out["name"], "shape": [2, 2], "datatype": "FP32", "data": [10, 11, 26, 27]}],
                }
        plain = (await client.post("/predict", {"features": [[1, 2, 3, 4], [5, 6, 7, 8]]})).json["prediction"]
        assert [value for row in plain for value in row] == [10, 11, 26, 27]
        assert (await client.get(f"/v2/models/one/versions/{version}/ready")).json == {"ready": True}

    serving(files["one"], scenario)


def test_outputs_are_chosen_by_name(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        inputs = [tensor([1, 2, 3, 4], [1, 4], "x"), tensor([1, 0, 1, 0], [1, 4], "keep")]
        both = (await client.post("/v2/models/named/infer", {"inputs": inputs})).json["outputs"]
        assert [(each["name"], each["shape"], each["data"]) for each in both] == [
            ("kept", [1, 4], [1, 0, 3, 0]),
            ("total", [1], [4]),
        ]
        one = await client.post("/v2/models/named/infer", {"inputs": inputs, "outputs": [{"name": "total"}]})
        assert [each["name"] for each in one.json["outputs"]] == ["total"]
        wrong = await client.post("/v2/models/named/infer", {"inputs": inputs, "outputs": [{"name": "totl"}]})
        assert (wrong.code, wrong.json) == (400, {"error": "no output 'totl'; did you mean total?"})

    serving(files["named"], scenario)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "no list of tensors"),
        ({"inputs": [{"name": "input"}]}, "lacks its name or data"),
        ({"inputs": [tensor([1, 2, 3], [1, 4])]}, "3 values do not make"),
        ({"inputs": [tensor([1, 2, 3, 4], [1, 4], datatype="FP64")]}, "want FP32"),
        ({"inputs": [tensor([1, 2, 3, 4], [4, 1])]}, "got shape"),
        ({"inputs": [tensor(["a", 2, 3, 4], [1, 4])]}, "want numbers"),
        ({"inputs": [tensor([1, 2, 3, 4], [-1, 4])]}, "no list of sizes"),
        ({"inputs": [tensor([], [10**9, 0])]}, "no list of sizes"),
        ({"inputs": [tensor([1], [1] * 70)]}, "70 dims"),
        ({"inputs": [tensor([1, 2, 3, 4], [1, 4])] * 2}, "twice"),
        ({"inputs": [tensor([1, 2, 3, 4], [1, 4], "inptu")]}, "did you mean input"),
        ({"inputs": [tensor([1, 2, 3, 4], [1, 4])], "id": 3}, "id is no text"),
        ({"inputs": [tensor([None, 2, 3, 4], [1, 4])]}, "want numbers"),
    ],
)
def test_what_does_not_fit_is_400(files: Files, body: dict[str, Any], says: str) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        found = await client.post("/v2/models/one/infer", body)
        assert found.code == 400 and says in found.json["error"], found.json

    serving(files["one"], scenario)


def test_other_names_and_versions_are_404(files: Files) -> None:
    async def scenario(client: Client, state: PredictServer) -> None:
        body = {"inputs": [tensor([1, 2, 3, 4], [1, 4])]}
        for path in ("/v2/models/two", "/v2/models/two/ready", "/v2/models/one/versions/7"):
            found = await client.get(path)
            assert found.code == 404 and "this server has" in found.json["error"]
        assert (await client.post("/v2/models/two/infer", body)).code == 404

    serving(files["one"], scenario)
