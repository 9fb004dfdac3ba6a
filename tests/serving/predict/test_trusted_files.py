"""Who may ask, and which files are run: keys as for chats, code only where convert wrote it or somebody trusts it."""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from armillary.errors import BadModel
from armillary.serving.predict.app import PredictServer, make_app
from armillary.serving.predict.trusted_files import FileTrust
from armillary.spec.tables.serve import Predict
from armillary.store.home import Home
from armillary.store.trusted_conversions import remember
from tests.serving.predict.asgi import Client, running
from tests.serving.predict.test_app import ROW, _until
from tests.serving.predict.test_model import onnx_linear

Files = dict[str, Path]
Cli = Callable[..., Any]


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def armed(source: Path, target: Path, mark: Path) -> Path:
    """A .pt2 whose example inputs are a pickle that runs code."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name.endswith(".pt"):
                with new.open(name, "w") as member:
                    torch.save(Bomb(mark), member)
            else:
                new.writestr(name, old.read(name))
    return target


def test_keys_are_asked_for_as_of_chats(files: Files, tmp_path: Path) -> None:
    async def scenario() -> None:
        trust = FileTrust(Home.at(tmp_path), every_file=True)
        state = PredictServer(files["one"], Predict(), trust=trust, keys=("k1", "k2"))
        async with running(make_app(state)) as client:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "k1"}):
                found = await client.send("POST", "/predict", b'{"features": [1, 2, 3, 4]}', headers=headers)
                assert found.code == 401 and "Bearer KEY" in found.json["error"]
                assert (await client.send("GET", "/schema", b"", headers=headers)).code == 401
            for headers in ({"authorization": "Bearer k2"}, {"x-api-key": "k1"}):
                found = await client.send("POST", "/predict", b'{"features": [1, 2, 3, 4]}', headers=headers)
                assert found.code == 200
            assert [(await client.get(path)).code for path in ("/health", "/ready", "/metrics")] == [200] * 3

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_files_of_strangers_need_trust_and_those_of_convert_do_not(files: Files, tmp_path: Path) -> None:
    home = Home.at(tmp_path)
    trust = FileTrust(home)
    for name in ("one", "traced"):
        with pytest.raises(BadModel, match=r"was not written by armillary convert.*--trust"):
            trust.check(files[name])
        FileTrust(home, every_file=True).check(files[name])
    remember(home, files["one"])
    trust.check(files["one"])
    changed = tmp_path / "one.pt2"
    changed.write_bytes(files["one"].read_bytes() + b"\0")
    with pytest.raises(BadModel, match="was not written by armillary convert"):
        trust.check(changed)


def test_onnx_needs_no_trust(tmp_path: Path) -> None:
    FileTrust(Home.at(tmp_path)).check(onnx_linear(tmp_path / "m.onnx"))


def test_archives_that_need_pickle_are_refused_whoever_vouches_for_them(files: Files, tmp_path: Path) -> None:
    mark, home = tmp_path / "ran", Home.at(tmp_path)
    whole, raw = tmp_path / "module.pt", tmp_path / "raw.pt"
    torch.save(torch.nn.Linear(2, 2), whole)
    raw.write_bytes(pickle.dumps(Bomb(mark)))
    for file in (armed(files["one"], tmp_path / "armed.pt2", mark), whole, raw):
        remember(home, file)
        with pytest.raises(BadModel, match="needs pickle, which runs code when it is read; ") as problem:
            FileTrust(home, every_file=True).check(file)
        assert "\n" not in str(problem.value)
    assert not mark.exists()
    FileTrust(home, every_file=True).check(files["weights"])  # weights alone: not a model, but no danger either


def test_a_changed_file_that_nobody_knows_is_refused_and_the_old_one_serves_on(files: Files, tmp_path: Path) -> None:
    home, file, said = Home.at(tmp_path / "home"), tmp_path / "model.pt2", list[str]()
    shutil.copy(files["one"], file)
    remember(home, file)

    async def scenario(client: Client, state: PredictServer) -> None:
        shutil.copy(files["two"], tmp_path / "next.pt2")
        os.replace(tmp_path / "next.pt2", file)
        await _until(lambda: bool(state.models.problem))
        assert (await client.post("/predict", ROW)).json["prediction"] == [10.0, 11.0]
        assert sum("was not written by armillary convert" in line for line in said) == 1
        shutil.copy(files["two"], tmp_path / "next.pt2")
        remember(home, tmp_path / "next.pt2")
        os.replace(tmp_path / "next.pt2", file)
        await _until(lambda: state.models.reloads == 1)
        assert (await client.post("/predict", ROW)).json["prediction"] == [20.0, 21.0]

    async def run() -> None:
        state = PredictServer(file, Predict(reload_s=0.02), said.append, trust=FileTrust(home))
        async with running(make_app(state)) as client:
            await scenario(client, state)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_convert_leaves_a_record_and_serve_asks_for_it(cli: Cli, files: Files, tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text("import torch\n\ndef Net():\n    return torch.nn.Linear(4, 2)\n")
    home = tmp_path / "home"
    made = cli("convert", f"{net}:Net", str(tmp_path / "net.pt2"), "--to", "pt2", "--input", "4", "--home", str(home))
    assert made.code == 0, made.err
    FileTrust(Home.at(home)).check(tmp_path / "net.pt2")
    ran = cli("serve", str(files["one"]), "--port", "0", "--home", str(home))
    assert ran.code == 2 and "add --trust" in ran.err and len(ran.err.strip().splitlines()) == 1
