"""The walk through a model: block after block is read, quantized, run and handed on to be written.

Two streams of hidden states go along: the held-out text through the original and through what has been quantized, so
perplexity and KL divergence are known when the last block is done, without a second model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from armillary.model.evaluation.perplexity import Comparison, comparison_of, window_figures
from armillary.model.evaluation.text_windows import TextWindows
from armillary.model.layers.attention_forms import Attend, plain
from armillary.model.quantized.packed_rows import PackedRows
from armillary.model.quantized.packed_rows import plain as plain_rows
from armillary.model.quantizing.awq import InputStatistics, Statistics, fold_factors, output_error, weight_of
from armillary.model.quantizing.block_stages import Stages, input_statistics, run_stage, watched
from armillary.model.quantizing.gptq import gptq
from armillary.model.quantizing.kv_calibration import KvCalibration
from armillary.model.quantizing.quantization_targets import Target
from armillary.model.quantizing.rounding import IntGrid
from armillary.model.quantizing.sparsegpt import sparsegpt
from armillary.model.transformer import Block, Progress, Transformer
from armillary.model.weights.hf_layout import SELECTION_BIAS, Rule, rules

_LINEAR = ("qkv.weight", ".q.weight", "out.weight", "up.weight", "down.weight", "up_E2FH", "down_EHF")
Fused: TypeAlias = "Tensor | PackedRows"
"""one of our tensors: plain, or packed with the experts of a layer as a leading dim"""


@dataclass(frozen=True, kw_only=True)
class LayerError:
    """How much rounding changed the outputs of a fused layer (without calibration: its weights), relative."""

    modules: tuple[str, ...]  # Hugging Face names
    error: float


@dataclass(kw_only=True)
class QuantizedStages:
    """Quantizes the blocks of a model one after the other; afterwards `errors` and `comparison` are known."""

    stages: Stages
    target: Target
    keep: Sequence[str] = ()  # patterns of modules that stay as they are
    calibration: TextWindows | None = None
    held_out: TextWindows | None = None
    kv: KvCalibration | None = None  # where ranges of a KV cache are wanted; then `calibration` is given
    progress: Progress | None = None  # blocks done, of how many
    errors: list[LayerError] = field(default_factory=list)
    comparison: Comparison | None = None

    def is_quantized(self, rule: Rule, columns: int) -> bool:
        is_end = self.target.spec.gguf and rule.name in ("embedding.weight", "output.weight")
        if not (is_end or (rule.name.startswith("blocks.") and rule.name.endswith(_LINEAR))):
            return False
        names, widths = rule.hf_names, {columns}
        if ".experts." in rule.name and self.stages.config.moe is not None:  # all experts of a layer or none
            prefix = rule.name.rpartition(".")[0]
            names = tuple(name for each in self._rules if each.name.startswith(prefix) for name in each.hf_names)
            widths = {self.stages.config.hidden, self.stages.config.moe.ffn}
        modules = [name.removesuffix(".weight") for name in names]
        is_kept = any(fnmatchcase(module, pattern) for module in modules for pattern in self.keep)
        return all(map(self.target.takes, widths)) and not is_kept

    @cached_property
    def _rules(self) -> list[Rule]:
        return rules(self.stages.config)

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[Rule, Fused]]:
        """Every tensor of the model in the order of its rules."""
        by_stage = _by_stage(self._rules)
        embedding = self.stages.embedding()
        reference = self._run(embedding, self.held_out)
        packed = self._round_plainly(embedding, by_stage["embedding"])
        yield from self._out(embedding, by_stage["embedding"], packed)
        measured, calibration = self._run(embedding, self.held_out), self._run(embedding, self.calibration)
        del embedding
        for layer in range(self.stages.config.num_layers):
            stage = self.stages.block(layer)
            reference = None if reference is None else run_stage(stage, reference)
            packed = self._quantize(stage, layer, by_stage[str(layer)], calibration)
            observed = plain if self.kv is None else self.kv.observed(layer)
            calibration = self._run_rounded(stage, layer, packed, calibration, observed)
            cached = plain if self.kv is None else self.kv.rounded(layer)
            measured = self._run_rounded(stage, layer, packed, measured, cached)
            yield from self._out(stage, by_stage[str(layer)], packed)
            if self.progress:
                self.progress(layer + 1, self.stages.config.num_layers)
        yield from self._finish(by_stage["head"], reference, measured)

    def _run(self, stage: Transformer, windows: TextWindows | None) -> Tensor | None:
        return None if windows is None else run_stage(stage, windows.tokens_WT)

    def _run_rounded(
        self, stage: Transformer, layer: int, packed: dict[str, PackedRows], x: Tensor | None, attend: Attend
    ) -> Tensor | None:
        """With inputs rounded where servers round them."""
        if x is None:
            return None
        rounded = self.target.spec.round_inputs
        if rounded is None:
            return run_stage(stage, x, attend)
        names = {name.removeprefix(f"blocks.{layer}.") for name in packed}
        with watched(stage.blocks[str(layer)], lambda name, x: rounded(x) if name.partition("#")[0] in names else x):
            return run_stage(stage, x, attend)

    def _finish(
        self, head_rules: list[Rule], reference: Tensor | None, measured: Tensor | None
    ) -> Iterator[tuple[Rule, Fused]]:
        head = self.stages.head()
        packed = self._round_plainly(head, head_rules)
        if self.target.spec.gguf and self.stages.config.tied:
            self._round_tied(head)
        yield from self._out(head, head_rules, packed)
        if measured is None or reference is None or self.held_out is None:
            return
        original, first, rows = self.stages.head(), self.held_out.first, []
        for x_TH, before_TH, tokens_T in zip(measured, reference, self.held_out.tokens_WT, strict=True):
            rows.append(window_figures(_logits(head, x_TH), _logits(original, before_TH), tokens_T, first))
        self.comparison = comparison_of(rows)

    def _round_tied(self, head: Transformer) -> None:
        weight, rule = head.head_weights()[0], self._rules[0]
        if self.is_quantized(rule, weight.shape[1]):
            weight.copy_(self.target.round(weight).dequantised())

    # --- one stage

    def _round_plainly(self, stage: Transformer, wanted: list[Rule]) -> dict[str, PackedRows]:
        """Embedding and head, which some formats round too."""
        packed = {}
        for rule in wanted:
            weight = stage.get_parameter(rule.name)
            if weight.ndim == 2 and self.is_quantized(rule, weight.shape[1]):
                packed[rule.name] = self._set(weight, [self.target.round(weight)], rule, None)
            else:
                weight.copy_(weight.to(self.target.dtype))
        return packed

    def _quantize(
        self, stage: Transformer, layer: int, wanted: list[Rule], calibration: Tensor | None
    ) -> dict[str, PackedRows]:
        """The layers of a block, whose weights become the rounded ones."""
        block, prefix = stage.blocks[str(layer)], f"blocks.{layer}."
        chosen = [r for r in wanted if r.name.endswith(_LINEAR) and self.is_quantized(r, _of(stage, r).shape[-1])]
        parts = {rule.name: _part_names(rule.name.removeprefix(prefix), _of(stage, rule)) for rule in chosen}
        names = {name for each in parts.values() for name in each}
        statistics: Statistics = {}
        if calibration is not None and self.target.spec.calibrated:
            statistics = input_statistics(stage, block, calibration, names)
        if self.target.spec.calibrated == "awq":
            grids = {name: self._grid(block, name) for name in names}
            statistics = fold_factors(block, statistics, grids)
        for rule in wanted:
            if rule not in chosen and not rule.name.endswith(SELECTION_BIAS):
                _of(stage, rule).copy_(_of(stage, rule).to(self.target.dtype))
        packed = {}
        for rule in chosen:
            rounded = [self._round(weight_of(block, name), statistics.get(name)) for name in parts[rule.name]]
            inputs = [statistics.get(name) for name in parts[rule.name]]
            packed[rule.name] = self._set(_of(stage, rule), rounded, rule, inputs)
        return packed

    def _grid(self, block: Block, name: str) -> IntGrid:
        grid = self.target.grid(weight_of(block, name).shape[1])
        assert grid is not None, "calibrated formats have integer codes"
        return grid

    def _round(self, weight_NK: Tensor, inputs: InputStatistics | None) -> PackedRows:
        if inputs is not None and self.target.spec.calibrated == "sparsegpt":
            return plain_rows(sparsegpt(weight_NK, inputs.gram_KK).to(self.target.dtype))
        grid = self.target.grid(weight_NK.shape[1])
        if inputs is None or grid is None:
            return self.target.round(weight_NK)
        if self.target.spec.calibrated == "gptq":
            return gptq(weight_NK, inputs.gram_KK, grid)
        return grid.round(weight_NK, inputs.gram_KK.diagonal())

    def _set(
        self, weight: Tensor, rounded: list[PackedRows], rule: Rule, inputs: Sequence[InputStatistics | None] | None
    ) -> PackedRows:
        """Put rounded weights in the place of the original ones, and keep how far off they are."""
        values = [each.dequantised().float() for each in rounded]
        originals = list(weight) if weight.ndim == 3 else [weight]
        error = size = 0.0
        for i, (value, original) in enumerate(zip(values, originals, strict=True)):
            of_part = inputs[i] if inputs is not None else None
            change = value - original
            error += output_error(change, of_part.gram_KK) if of_part else float(change.square().sum())
            size += output_error(original, of_part.gram_KK) if of_part else float(original.square().sum())
        modules = tuple(name.removesuffix(".weight") for name in rule.hf_names)
        self.errors.append(LayerError(modules=modules, error=(max(error, 0.0) / max(size, 1e-30)) ** 0.5))
        weight.copy_(torch.stack(values) if weight.ndim == 3 else values[0])
        if weight.ndim == 2:
            return rounded[0]
        rows = {name: torch.stack([each.rows[name] for each in rounded]) for name in rounded[0].rows}
        return PackedRows(format=rounded[0].format, rows=rows, columns=rounded[0].columns)

    def _out(
        self, stage: Transformer, wanted: list[Rule], packed: dict[str, PackedRows]
    ) -> Iterator[tuple[Rule, Fused]]:
        for rule in wanted:
            if rule.name in packed:
                yield rule, packed[rule.name].to(torch.device("cpu"))
            else:
                dtype = torch.float32 if rule.name.endswith(SELECTION_BIAS) else self.target.dtype
                yield rule, _of(stage, rule).to("cpu", dtype)


def _by_stage(all_rules: list[Rule]) -> dict[str, list[Rule]]:
    stages: dict[str, list[Rule]] = {"embedding": [], "head": []}
    for rule in all_rules:
        parts = rule.name.split(".")
        key = parts[1] if parts[0] == "blocks" else "embedding" if parts[0] == "embedding" else "head"
        stages.setdefault(key, []).append(rule)
    return stages


def _of(stage: Transformer, rule: Rule) -> Tensor:
    """The parameter or buffer that a rule fills."""
    module, _, name = rule.name.rpartition(".")
    return getattr(stage.get_submodule(module), name).detach()


def _part_names(name: str, weight: Tensor) -> list[str]:
    """The matrices of a parameter: itself, or one for each expert."""
    return [name] if weight.ndim == 2 else [f"{name}#{e}" for e in range(len(weight))]


def _logits(head: Transformer, x_TH: Tensor) -> Tensor:
    device = next(head.parameters()).device
    hidden = x_TH.to(device)[None] if head.norm is None else head.norm(x_TH.to(device)[None])
    return head.head(hidden)[0]
