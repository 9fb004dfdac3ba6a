"""Export of a model as one file that needs none of our Python: torch.export (.pt2) or ONNX (.onnx), with dynamic rows.

The file is read back and compared with the module it came from, on batches it was not traced with.
"""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from armillary.errors import BadInput, BadModel, missing
from armillary.kernels.attention.attention import AttentionOptions
from armillary.kernels.core.torch_compat import load_program
from armillary.model.layers.attention_forms import masked, plain
from armillary.model.transformer import Transformer

ExportFormat = Literal["pt2", "onnx"]
_TRACED_ROWS, _FREE = 2, 8
_INPUT = re.compile(r"^(?:(?P<dtype>[a-z]+\d*):)?(?P<sizes>[\d*]+(?:x[\d*]+)*)$")


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a module, without the row dim."""

    sizes: tuple[int | None, ...]  # None: any size
    dtype: torch.dtype = torch.float32
    longest: int | None = None  # of dynamic dims; None: no limit
    below: int = 2  # integers are tried from 0 to this

    def example(self, rows: int, *, free: int = _FREE, seed: int = 0) -> Tensor:
        shape = [rows, *(free if size is None else size for size in self.sizes)]
        generator = torch.Generator().manual_seed(seed)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=generator).to(self.dtype)
        return torch.randint(0, self.below, shape, generator=generator).to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A file that was written and checked."""

    path: Path
    bytes: int
    inputs: tuple[Input, ...]
    rows: int | None  # fixed number of rows; None: any
    error: float
    """largest difference from the module over the largest value"""


def parse_input(text: str) -> Input:
    """'3x32x32', 'int64:128', 'float32:*x80' (a star is any size)."""
    parsed = _INPUT.match(text.strip())
    dtype = getattr(torch, parsed["dtype"] or "float32", None) if parsed else None
    if parsed is None or not isinstance(dtype, torch.dtype):
        raise BadInput(f"cannot read --input {text!r}; write a row's shape like 3x32x32, int64:128 or float32:*x80")
    sizes = tuple(None if part == "*" else int(part) for part in parsed["sizes"].split("x") if part)
    return Input(sizes=sizes, dtype=dtype)


def inputs_like(examples: Sequence[Tensor]) -> tuple[Input, ...]:
    """Inputs with the shapes of tensors that have rows first."""
    return tuple(Input(sizes=tuple(example.shape[1:]), dtype=example.dtype) for example in examples)


class Logits(nn.Module):
    """Our transformer as a function of tokens alone: [rows, length] -> logits [rows, length, vocabulary]."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None].expand(tokens.shape[0], -1)
        return self.model.head(self.model(tokens, positions, _attend))


def _attend(layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
    """Plain attention without a branch on the sequence length, which a trace would fix."""
    if options.is_plain and not options.window and not options.chunk:
        return plain(layer, q, k, v, options)
    index = torch.arange(q.shape[1], device=q.device)[None]
    return masked(q, k, v, options, index, index, None)


def of_transformer(model: Transformer) -> tuple[nn.Module, tuple[Input, ...]]:
    config = model.config
    return Logits(model), (Input(sizes=(None,), dtype=torch.int64, longest=config.context, below=config.vocab),)


def export(
    module: nn.Module, inputs: Sequence[Input], path: Path, form: ExportFormat, *, rows: int | None = None
) -> Exported:
    """Write `module` to `path`; `rows` fixes their number, which is dynamic otherwise."""
    module = module.eval().requires_grad_(False)
    examples = tuple(each.example(rows or _TRACED_ROWS) for each in inputs)
    shapes = None if rows else tuple(_dims(each) for each in inputs)
    program = _traced(module, examples, shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "pt2":
        torch.export.save(program, str(path))
    else:
        _write_onnx(program, path)
    error = _check(module, inputs, path, form, rows)
    return Exported(path=path, bytes=path.stat().st_size, inputs=tuple(inputs), rows=rows, error=error)


def _dims(each: Input) -> dict[int, Any]:
    free: dict[int, Any] = {0: torch.export.Dim("rows")}
    for place, size in enumerate(each.sizes, start=1):
        if size is None:
            free[place] = torch.export.Dim.DYNAMIC(max=each.longest)  # the trace finds out which are equal
    return free


def _traced(module: nn.Module, examples: tuple[Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
    try:
        with torch.no_grad(), _quiet():
            return torch.export.export(module, examples, dynamic_shapes=shapes)
    except Exception as error:  # the tracer and the module raise anything
        reason = " ".join(str(error).split())[:240]
        raise BadModel(
            f"it cannot be exported ({type(error).__name__}: {reason}); check --input, or fix the number of "
            "rows with --rows"
        ) from None


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError:
        raise missing("onnxscript", "writing ONNX", "onnx") from None
    with _quiet():
        onnx_program = torch.onnx.export(program, dynamo=True, verbose=False)
        assert onnx_program is not None
        onnx_program.save(str(path), external_data=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings about their own deprecations and about packages that are not needed."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# --- check of the written file


def _check(module: nn.Module, inputs: Sequence[Input], path: Path, form: ExportFormat, rows: int | None) -> float:
    """The largest relative difference over batches that were not traced."""
    run = _reader(path, form)
    worst = 0.0
    for seed, count in enumerate([rows] if rows else [1, 3]):
        free = _FREE + 3 * seed
        batch = [each.example(count, free=min(free, each.longest or free), seed=seed + 1) for each in inputs]
        with torch.no_grad():
            expected = [leaf for leaf in pytree.tree_leaves(module(*batch)) if isinstance(leaf, Tensor)]
        for want, got in zip(expected, run(batch), strict=True):
            worst = max(worst, _error(want, got))
    bound = 2e-2 if any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()) else 1e-3
    if not worst <= bound:
        raise BadModel(
            f"{path} gives other results than the model it was made from ({worst:.2g} apart); it may depend "
            "on its values or on how many rows there are: fix them with --rows"
        )
    return worst


def _error(want: Tensor, got: Tensor) -> float:
    want, got = want.double(), got.double()
    scale = max(1e-9, float(want.abs().max())) if want.numel() else 1.0
    return float((want - got).abs().max()) / scale if want.numel() else 0.0


def _reader(path: Path, form: ExportFormat) -> Any:
    if form == "pt2":
        module = load_program(path).module()
        return lambda batch: [leaf for leaf in pytree.tree_leaves(module(*batch)) if isinstance(leaf, Tensor)]
    try:
        import onnxruntime
    except ModuleNotFoundError:
        raise missing("onnxruntime", "checking ONNX", "onnx") from None
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(batch: list[Tensor]) -> list[Tensor]:
        outputs = session.run(None, {name: each.numpy() for name, each in zip(names, batch, strict=True)})
        return [torch.from_numpy(output) for output in outputs]

    return run
