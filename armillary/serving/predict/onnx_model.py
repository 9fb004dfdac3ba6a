"""ONNX models (.onnx) through onnxruntime; a dimension without a number is free."""

from pathlib import Path
from typing import Any

from armillary.errors import BadModel
from armillary.machine.cores import compute_threads
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Field, Schema, fixed_schema
from armillary.spec.tables.serve import Predict

_DTYPES = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int16)": "int16",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}


class OnnxModel:
    """An onnxruntime session."""

    def __init__(self, file: Path, settings: Predict) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = settings.threads or compute_threads()
        options.log_severity_level = 3
        names = onnxruntime.get_available_providers()
        wanted = ["CUDAExecutionProvider"] if settings.device.startswith("cuda") else []
        providers = [name for name in [*wanted, "CPUExecutionProvider"] if name in names]
        self._session = onnxruntime.InferenceSession(str(file), options, providers=providers)
        self.schema = _schema(self._session)
        self._names = [field.name for field in self.schema.inputs]

    def run(self, arrays: Arrays) -> Arrays:
        return list(self._session.run(None, dict(zip(self._names, arrays, strict=True))))


def _schema(session: Any) -> Schema:
    inputs = tuple(_field(value) for value in session.get_inputs())
    outputs = tuple(_field(value) for value in session.get_outputs())
    firsts = [value.shape[0] if value.shape else None for value in (*session.get_inputs(), *session.get_outputs())]
    free = all(not isinstance(size, int) for size in firsts) and len({str(size) for size in firsts}) == 1
    if free and all(field.shape for field in (*inputs, *outputs)):
        return Schema(inputs=inputs, outputs=outputs, batched=True)
    return fixed_schema(inputs, outputs)


def _field(value: Any) -> Field:
    if value.type not in _DTYPES:
        raise BadModel(f"'{value.name}' is {value.type}, which JSON cannot represent; export it with numbers")
    shape = tuple(size if isinstance(size, int) else None for size in value.shape)
    return Field(name=value.name, dtype=_DTYPES[value.type], shape=shape)
