"""Opens the data of a run and builds its model, random or from a folder, sharded over the ranks."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch

from armillary.errors import BadData
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_weights import load_model
from armillary.parallel.apply import Sharded, apply
from armillary.parallel.consensus import Consensus
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.stage import make_stage_model
from armillary.parallel.shard_weights import fill_from, fill_random, materialise
from armillary.spec.plan import Plan
from armillary.store.home import Home
from armillary.training.open_data import OpenData, open_data
from armillary.training.setup.kernel_selection import Choices, use_kernels
from armillary.training.step.lora import add_lora, base_dtype


def open_text(plan: Plan) -> OpenData:
    """The plan's shards, checked against its model."""
    assert plan.train is not None and plan.data is not None
    opened = open_data(plan.data, plan.train)
    if opened.vocab > plan.model.vocab:
        have, most = opened.vocab, plan.model.vocab
        raise BadData(
            f"{plan.data.path or plan.data.paths[0]} has token ids up to {have - 1}, beyond the model's "
            f"vocabulary of {most}; prepare it with --vocab {most}, or --set model.vocab={have}"
        )
    return opened


class Started(NamedTuple):
    """A model ready to be trained."""

    sharded: Sharded
    choices: Choices


def start_model(
    plan: Plan, mesh: Mesh, ranks: Consensus, *, names: Mapping[str, str] | None = None, home: Home | None = None
) -> Started:
    """The model with its initial weights, sharded by the layout. The main rank selects the kernels for all, unless
    `names` has what was chosen when the run began; what it finds is kept in `home`. Where ranks share the weights none
    ever holds the full model: it is built on meta, sharded, and each rank keeps its shard of every tensor."""
    job, layout, device = plan.train, plan.layout, mesh.world.device
    assert job is not None
    copies = layout.tp == layout.pp == layout.ep == 1 and (layout.zero == 0 or mesh.num_copies == 1)
    model = ranks.run_long("load the model", lambda: _full_model(plan, device) if copies else _on_meta(plan, mesh))
    ranks.run_on_all(lambda: add_lora(model, job, precision=layout.precision))
    choices = _choices(plan, model, device, ranks, names or {}, home)
    sharded = ranks.run_on_all(lambda: apply(model, layout, mesh, loss=choices.loss, compile=job.compiled))
    if not copies:
        ranks.run_long("load the model", lambda: _fill(plan, model, device))
    model.train()
    return Started(sharded, choices)


def _choices(
    plan: Plan, model: Transformer, device: torch.device, ranks: Consensus, names: Mapping[str, str], home: Home | None
) -> Choices:
    assert plan.train is not None
    use = partial(use_kernels, model, job=plan.train, layout=plan.layout, device=device, home=home)
    if ranks.size == 1:
        return use(names=names or None)
    known = ranks.broadcast(ranks.run_long("choose kernels", lambda: names or (use().names if ranks.is_main else {})))
    return ranks.run_on_all(lambda: use(names=known or None))


def _dtype(plan: Plan) -> torch.dtype:
    """Stepped weights are fp32; those that LoRA freezes are kept in the format they are multiplied in."""
    assert plan.train is not None
    return base_dtype(plan.train, plan.layout.precision)


def _full_model(plan: Plan, device: torch.device) -> Transformer:
    assert plan.train is not None
    if plan.weights:
        return load_model(plan.weights, dtype=_dtype(plan), device=device)
    return build(plan.model, dtype=_dtype(plan), device=device, seed=plan.train.seed)


def _on_meta(plan: Plan, mesh: Mesh) -> Transformer:
    assert plan.train is not None
    with torch.device("meta"):
        if plan.layout.pp > 1:
            held: Transformer = make_stage_model(plan.model, plan.layout, mesh.rank("pp"), sequence=plan.train.sequence)
            return held.to(_dtype(plan))
        return Transformer(plan.model).to(_dtype(plan))


def _fill(plan: Plan, model: Transformer, device: torch.device) -> None:
    assert plan.train is not None
    materialise(model, device)
    if plan.weights:
        fill_from(model, plan.weights, seed=plan.train.seed)
    else:
        fill_random(model, seed=plan.train.seed)
