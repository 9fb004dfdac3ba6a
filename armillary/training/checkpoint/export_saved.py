"""A checkpoint as a Hugging Face folder, by one process and without the run's devices or layout."""

from contextlib import suppress
from pathlib import Path

import torch

from armillary.errors import ArmillaryError
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model, save_model
from armillary.parallel.consensus import Consensus
from armillary.spec.plan import Plan
from armillary.store.runs import Run
from armillary.training.checkpoint.checkpoint import read_tensors
from armillary.training.checkpoint.export import MergedWeights
from armillary.training.open_data import open_data
from armillary.training.step.lora import add_lora, base_dtype


def export_saved(run: Run, step: int, target: Path) -> Path:
    """Write the weights of a checkpoint, with adapters merged in, on the host's memory."""
    plan = Plan.from_json(run.plan.read_text(), str(run.plan))
    assert plan.train is not None, "a run of training"
    model = _model(plan)
    parameters = dict(model.named_parameters())
    names = {name for name, value in parameters.items() if value.requires_grad} | set(dict(model.named_buffers()))
    state = {f"model.{name}": value for name, value in model.state_dict().items() if name in names}
    read_tensors(run.checkpoint(step), state, Consensus(rank=0, size=1))
    read = MergedWeights(plan.model, lambda name: parameters[name].detach(), plan.train)
    return save_model(model, target, template=_tokenizer(plan), overwrite=True, read=read)


def _model(plan: Plan) -> Transformer:
    """With the weights that the run started from, where it has adapters beside them; else of any weights."""
    job, host = plan.train, torch.device("cpu")
    assert job is not None
    dtype = base_dtype(job, plan.layout.precision)
    model = (
        load_model(plan.weights, dtype=dtype, device=host)
        if plan.weights
        else build(plan.model, dtype=dtype, device=host, seed=job.seed)
    )
    add_lora(model, job, precision=plan.layout.precision)
    return model


def _tokenizer(plan: Plan) -> Path | None:
    """That of the text, where it is still there."""
    assert plan.train is not None
    with suppress(ArmillaryError):
        if plan.data is not None:
            return open_data(plan.data, plan.train).tokenizer_folder
    return None
