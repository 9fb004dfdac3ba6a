"""The trained model as a Hugging Face folder, gathered from the ranks a tensor at a time; adapters are merged in, and
also written by themselves.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import Tensor

from armillary.model.lora import NAMES, change
from armillary.model.quantized.packed_linear import PackedLinear
from armillary.model.weights.hf_layout import rules
from armillary.model.weights.hf_weights import save_model
from armillary.parallel.apply import Sharded
from armillary.parallel.consensus import Consensus, attempt
from armillary.spec.lora import targets
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.training.step.lora import save_adapter


def export(sharded: Sharded, job: TrainJob, folder: Path, ranks: Consensus, *, tokenizer: Path) -> Path:
    """Every rank calls this; the main rank writes, and all raise its error where it cannot."""
    reader, error = MergedWeights(sharded.model.config, partial(_gathered, sharded), job), None
    if ranks.is_main:
        _, error = attempt(lambda: save_model(sharded.model, folder, template=tokenizer, overwrite=True, read=reader))
    reader.rest()
    ranks.agree(error)
    return folder


def export_adapter(sharded: Sharded, job: TrainJob, folder: Path, ranks: Consensus, *, base: str) -> Path:
    """The adapters alone, as a folder that peft reads; every rank calls this."""
    config, error = sharded.model.config, None
    names = [f"{module}.{adapter}" for module in targets(config, job.lora_on) for adapter in NAMES]
    tensors = {name: sharded.full_tensor(name) for name in names}
    if ranks.is_main:
        _, error = attempt(lambda: save_adapter(tensors, config, job, folder, base=base, overwrite=True))
    ranks.agree(error)
    return folder


def _gathered(sharded: Sharded, name: str) -> Tensor:
    """A full tensor; a packed weight, which one device has, is dequantised."""
    modules = dict(sharded.model.named_modules())  # of a pipeline's stage, not all
    module = modules.get(name.removesuffix(".weight"))
    if not isinstance(module, PackedLinear):
        return sharded.full_tensor(name)
    return module.weight.dequantised().to(next(sharded.model.parameters()).dtype)


class MergedWeights:
    """A parameter of all ranks by its name, with its adapter merged in: sums are taken in fp32 at least and have the
    weight's own dtype. Gathering needs every rank, so all ask for the same ones in one order."""

    def __init__(self, config: ModelConfig, gathered: Callable[[str], Tensor], job: TrainJob) -> None:
        self._gathered = gathered
        self._adapted = targets(config, job.lora_on) if job.lora_rank else {}
        self._scale, self._next = job.lora_scale, 0
        self._names = [rule.name for rule in rules(config)]

    def __call__(self, name: str) -> Tensor:
        assert name == self._names[self._next], "asked in the order of the rules"
        self._next += 1
        tensor = self._gathered(name)
        module = name.removesuffix(".weight")
        if module not in self._adapted or module == name:
            return tensor
        a, b = (self._gathered(f"{module}.{adapter}") for adapter in NAMES)
        added = change(a, b, self._adapted[module], scale=self._scale)
        return (tensor.to(added.dtype) + added).to(tensor.dtype)

    def rest(self) -> None:
        """Take part in what is left: on ranks that do not write, all of it."""
        while self._next < len(self._names):
            self(self._names[self._next])
