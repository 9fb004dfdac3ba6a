"""Small model files, made once: an MLP with free rows, its newer version, one with fixed rows, one that mixes rows."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch


def export(module: object, path: Path, *examples: object, free: bool = True) -> Path:
    shapes = tuple({0: torch.export.Dim("rows", max=64)} for _ in examples) if free else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module.eval(), examples, dynamic_shapes=shapes), str(path))  # type: ignore[attr-defined]
    return path


def linear(weight: float) -> object:
    """Four features to two: weight times their sum, and that plus one."""
    layer = torch.nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.copy_(torch.tensor([0.0, 1.0]))
    return layer.requires_grad_(False)


class Mixing(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Takes the mean of all rows away: a row's result depends on its neighbours."""

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x - x.mean(0, keepdim=True)


class Two(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Two inputs, two outputs by name."""

    def forward(self, x, keep):  # type: ignore[no-untyped-def]
        return {"kept": x * keep, "total": (x * keep).sum(1)}


class Names(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Ten names as vectors: an eleventh is an error that no schema can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 2).requires_grad_(False)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.table(x).sum(1)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, x = tmp_path_factory.mktemp("models"), torch.ones(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(linear(1.0), (x,)).save(str(folder / "traced.pt"))
        torch.jit.script(torch.nn.Sequential(torch.nn.Flatten(), linear(1.0))).save(str(folder / "shapeless.pt"))
    torch.save(linear(1.0).state_dict(), folder / "weights.pt")  # type: ignore[attr-defined]
    (folder / "broken.pt2").write_bytes(b"nothing")
    return {
        "one": export(linear(1.0), folder / "one.pt2", x),
        "two": export(linear(2.0), folder / "two.pt2", x),
        "fixed": export(linear(1.0), folder / "fixed.pt2", torch.ones(3, 4), free=False),
        "mixing": export(Mixing(), folder / "mixing.pt2", x),
        "names": export(Names(), folder / "names.pt2", torch.zeros(2, 3, dtype=torch.int64)),
        "named": export(Two(), folder / "named.pt2", x, 2 * x),
        **{
            name: folder / file
            for name, file in (
                ("traced", "traced.pt"),
                ("shapeless", "shapeless.pt"),
                ("weights", "weights.pt"),
                ("broken", "broken.pt2"),
            )
        },
    }
