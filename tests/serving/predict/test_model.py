"""Files of every kind: what their schemas are, and that they compute what the module does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armillary.errors import BadModel, NotFound
from armillary.serving.predict.model import open_file
from armillary.serving.predict.versions import is_model_file, newest
from armillary.spec.tables.serve import Predict

Files = dict[str, Path]
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def test_an_exported_file_says_everything(files: Files) -> None:
    found = open_file(files["one"], Predict())
    schema = found.schema
    assert schema.batched and schema.max_rows == 64 and found.note == ""
    assert [(one.name, one.dtype, one.shape) for one in schema.inputs] == [("input", "float32", (None, 4))]
    assert [one.shape for one in schema.outputs] == [(None, 2)]
    assert found.model.run([ROWS])[0].tolist() == [[6, 7], [22, 23]]


def test_outputs_have_names(files: Files) -> None:
    found = open_file(files["named"], Predict())
    assert [one.name for one in found.schema.outputs] == ["kept", "total"]
    kept, total = found.model.run([ROWS, np.ones_like(ROWS)])
    assert kept.tolist() == ROWS.tolist() and total.tolist() == [6, 22]


def test_fixed_rows_are_known(files: Files) -> None:
    schema = open_file(files["fixed"], Predict()).schema
    assert schema.batched and schema.fixed_rows == 3


def test_a_model_that_mixes_rows_is_not_batched(files: Files) -> None:
    found = open_file(files["mixing"], Predict())
    assert not found.schema.batched and "depends on the rows beside it" in found.note


def test_torchscript_shapes_are_read_off_the_first_layer(files: Files) -> None:
    found = open_file(files["traced"], Predict())
    assert found.schema.inputs[0].shape == (None, 4) and found.model.run([ROWS])[0].tolist() == [[6, 7], [22, 23]]
    unknown = open_file(files["shapeless"], Predict())
    assert unknown.schema.inputs[0].shape is None and "does not state shapes" in unknown.note


@pytest.mark.parametrize(("name", "words"), [("weights", "is not TorchScript"), ("broken", "cannot be loaded")])
def test_what_is_no_model_is_refused(files: Files, name: str, words: str) -> None:
    with pytest.raises(BadModel, match=words):
        open_file(files[name], Predict())


def onnx_linear(path: Path, *, rows: Any = "rows") -> Path:
    import onnx

    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(np.ones((4, 2), dtype=np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", kind, [rows, 4])],
        [helper.make_tensor_value_info("y", kind, [rows, 2])],
        [weight],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), str(path))
    return path


def test_onnx(tmp_path: Path) -> None:
    found = open_file(onnx_linear(tmp_path / "m.onnx"), Predict(threads=1))
    assert found.schema.batched and found.schema.inputs[0].shape == (None, 4)
    assert found.model.run([ROWS])[0].tolist() == [[6, 6], [22, 22]]
    assert open_file(onnx_linear(tmp_path / "f.onnx", rows=5), Predict(threads=1)).schema.fixed_rows == 5


def test_versions_are_numbered_folders(files: Files, tmp_path: Path) -> None:
    assert not is_model_file(tmp_path) and is_model_file(files["one"]) and not is_model_file(tmp_path / "x.gguf")
    for number in ("2", "10"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "model.pt2").write_bytes(files["one"].read_bytes())
    (tmp_path / "11").mkdir()  # nothing in it yet
    assert is_model_file(tmp_path) and newest(tmp_path).name == "10"
    (tmp_path / "10" / "other.onnx").write_bytes(b"")
    with pytest.raises(BadModel, match="holds 2 models"):
        newest(tmp_path)
    with pytest.raises(NotFound, match="armillary convert"):
        newest(tmp_path / "gone.pt2")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["one", "named", "fixed", "traced"])
def test_the_same_on_a_gpu(files: Files, name: str) -> None:
    on_cpu, on_gpu = open_file(files[name], Predict()), open_file(files[name], Predict(device="cuda"))
    assert on_cpu.schema == on_gpu.schema
    rows = np.random.default_rng(0).standard_normal((on_cpu.schema.fixed_rows or 5, 4)).astype(np.float32)
    arrays = [rows for _ in on_cpu.schema.inputs]
    for want, got in zip(on_cpu.model.run(arrays), on_gpu.model.run(arrays), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
