"""Runs a torch callable on arrays: dtypes, device, threads, no gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from armillary.errors import BadInput
from armillary.model.device import fit_threads
from armillary.serving.predict.batcher import Arrays
from armillary.serving.predict.schema import Schema
from armillary.spec.tables.serve import Predict

_NOT_IN_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


class TorchModel:
    """A torch callable with a schema."""

    def __init__(
        self, call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], schema: Schema, settings: Predict
    ) -> None:
        self.schema, self._call = schema, call
        self._device = device_of(settings)
        self._dtypes = [getattr(torch, field.dtype) for field in schema.inputs]
        if settings.threads:
            torch.set_num_threads(settings.threads)
        else:
            fit_threads()

    def run(self, arrays: Arrays) -> Arrays:
        with torch.inference_mode():
            tensors = [
                torch.from_numpy(array).to(self._device, dtype)
                for array, dtype in zip(arrays, self._dtypes, strict=True)
            ]
            return [_array(output) for output in self._call(tensors)]


def device_of(settings: Predict) -> torch.device:
    try:
        return torch.device(settings.device)
    except RuntimeError:
        raise BadInput(f"no device '{settings.device}'; use cpu or cuda") from None


def _array(output: torch.Tensor) -> Any:
    """As numpy, which has no bfloat16 and no fp8."""
    output = output.detach()
    return (output.float() if output.dtype in _NOT_IN_NUMPY else output).cpu().numpy()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
