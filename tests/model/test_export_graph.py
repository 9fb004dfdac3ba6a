"""Models as one file: ours and other people's, with rows and lengths left free, checked against what they came from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from armillary.errors import BadInput, BadModel, NotFound
from armillary.kernels.core.torch_compat import load_program
from armillary.model.export_graph import Input, export, inputs_like, of_transformer, parse_input
from armillary.model.layers.attention_forms import plain
from armillary.model.transformer import build
from armillary.model.user_module import is_python_module, load_python_module
from armillary.spec.model import LayerKind, ModelConfig

WINDOWED = ModelConfig(
    name="t",
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=64,
    vocab=96,
    context=64,
    window=5,
    layers=(LayerKind(attention="sliding"),),
)
NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(4, width)

    def forward(self, x):
        return torch.relu(self.layer(x))

class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x - 1

class Rows(nn.Module):
    def forward(self, x):
        return x / len(x) if isinstance(len(x), int) and len(x) == 2 else x / 2

def wide():
    made = Net(32)
    made.example_inputs = (torch.zeros(3, 4),)
    return made

def needs(width):
    return Net(width)

number = 3
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return str(tmp_path / "net.py")


def test_a_transformer_takes_any_rows_and_lengths(tmp_path: Path) -> None:
    """Also beyond its window, where the plain form asks for the length."""
    model = build(WINDOWED, dtype=torch.float32, device="cpu", seed=0)
    made = export(*of_transformer(model), tmp_path / "m.pt2", "pt2")
    assert made.error <= 1e-5 and made.rows is None
    tokens = torch.randint(0, 96, (3, 41))
    positions = torch.arange(41)[None].expand(3, -1)
    expected = model.head(model(tokens, positions, plain))
    found = load_program(made.path).module()(tokens)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", Input(sizes=(4,))),
        ("3x32x32", Input(sizes=(3, 32, 32))),
        ("int64:128", Input(sizes=(128,), dtype=torch.int64)),
        ("float16:*x80", Input(sizes=(None, 80), dtype=torch.float16)),
    ],
)
def test_inputs_as_text(text: str, expected: Input) -> None:
    assert parse_input(text) == expected


@pytest.mark.parametrize("text", ["", "x", "3x", "floaty:3", "save:3", "3,4", "-1"])
def test_nonsense_is_no_input(text: str) -> None:
    with pytest.raises(BadInput, match="write a row's shape like"):
        parse_input(text)


def test_modules_of_a_python_file(net: str) -> None:
    assert is_python_module(net) and is_python_module(f"{net}:Net") and not is_python_module("gpt2")
    module, examples = load_python_module(f"{net}:wide")
    assert isinstance(module, nn.Module) and inputs_like(examples) == (Input(sizes=(4,)),)
    assert load_python_module(f"{net}:Net")[1] == ()
    for name, error, words in (
        ("", BadInput, "needs the name"),
        (":Nett", NotFound, "did you mean Net"),
        (":number", BadInput, "not a torch module"),
        (":needs", BadInput, "cannot be called without arguments"),
    ):
        with pytest.raises(error, match=words):
            load_python_module(net + name)
    with pytest.raises(NotFound, match="no file"):
        load_python_module("gone.py:Net")


def test_what_cannot_be_exported_is_said(net: str, tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="cannot be exported"):
        export(load_python_module(f"{net}:Branching")[0], [Input(sizes=(4,))], tmp_path / "b.pt2", "pt2")


def test_rows_can_be_fixed(net: str, tmp_path: Path) -> None:
    made = export(load_python_module(f"{net}:Rows")[0], [Input(sizes=(4,))], tmp_path / "r.pt2", "pt2", rows=2)
    assert made.rows == 2 and made.error == 0


def test_the_verb(net: str, tmp_path: Path, cli: Callable[..., Any]) -> None:
    target = str(tmp_path / "out.pt2")
    ran = cli("convert", f"{net}:wide", target, "--to", "pt2", "--json")
    assert ran.code == 0 and ran.json["rows"] is None and ran.json["error"] < 1e-5, ran.err
    for arguments, words in (
        ((f"{net}:wide", target, "--to", "pt2"), "already there"),
        ((f"{net}:Net", str(tmp_path / "o.pt2"), "--to", "pt2"), "--input 3x32x32"),
        ((f"{net}:wide", str(tmp_path / "o.onnx"), "--to", "pt2"), "does not end in .pt2"),
        (("gpt2", str(tmp_path / "o"), "--rows", "3"), "leave them out for a folder"),
        (("gpt2", str(tmp_path / "o.pt2"), "--to", "pt2", "--input", "3"), "takes tokens"),
    ):
        ran = cli("convert", *arguments)
        assert ran.code == 2 and words in ran.err


@pytest.mark.slow
def test_onnx_agrees(net: str, tmp_path: Path) -> None:
    module, examples = load_python_module(f"{net}:wide")
    assert export(module, inputs_like(examples), tmp_path / "m.onnx", "onnx").error <= 1e-5
    model = build(WINDOWED, dtype=torch.float32, device="cpu", seed=0)
    assert export(*of_transformer(model), tmp_path / "t.onnx", "onnx").error <= 1e-4
