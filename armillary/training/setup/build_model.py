"""Opens the data of a run and builds its model, random or from a folder, sharded over the ranks."""

from collections.abc import Callable, Mapping
from functools import partial

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
            f"vocabulary of {most}; prepare it with --tokenizer {most}, or --set model.vocab={have}"
        )
    return opened


def build_model(
    plan: Plan, mesh: Mesh, ranks: Consensus, *, names: Mapping[str, str] | None = None, home: Home | None = None
) -> tuple[Sharded, Choices]:
    """The model with its initial weights, sharded by the layout, and its kernels. The main rank selects those for all,
    unless `names` has what was selected when the run began; new selections are cached in `home`. Where ranks share the
    weights no rank ever has the full model: it is built on meta, sharded, and each rank fills its own shards. Stored
    weights are read once per machine."""
    job, layout, device = plan.train, plan.layout, mesh.world.device
    assert job is not None
    dtype = base_dtype(job, layout.precision)
    replicated = layout.tp == layout.pp == layout.ep == 1 and (layout.zero == 0 or mesh.num_copies == 1)

    def full() -> Transformer:
        if plan.weights and ranks.size == 1:
            return load_model(plan.weights, dtype=dtype, device=device, packed="dense" if job.lora_rank else False)
        return build(plan.model, dtype=dtype, device=device, seed=None if plan.weights else job.seed)

    def on_meta() -> Transformer:
        with torch.device("meta"):
            model: Transformer = (
                make_stage_model(plan.model, layout, mesh.rank("pp"), sequence=job.sequence)
                if layout.pp > 1
                else Transformer(plan.model)
            )
            return model.to(dtype)

    def fill() -> None:
        if not replicated:
            materialise(model, device)
        if plan.weights:
            fill_from(model, plan.weights, seed=job.seed, ranks=ranks, machines=mesh.machines)
        else:
            fill_random(model, seed=job.seed)

    model = ranks.run_long("load the model", full if replicated else on_meta)
    ranks.run_on_all(lambda: add_lora(model, job, precision=layout.precision))
    choices = _choices(
        partial(use_kernels, model, job=job, layout=layout, device=device, home=home), ranks, names or {}
    )
    sharded = ranks.run_on_all(lambda: apply(model, layout, mesh, loss=choices.loss, compile=job.compiled))
    if not replicated or (plan.weights and ranks.size > 1):
        ranks.run_long("load the model", fill)
    model.train()
    return sharded, choices


def _choices(select: Callable[..., Choices], ranks: Consensus, names: Mapping[str, str]) -> Choices:
    if ranks.size == 1:
        return select(names=names or None)
    known = ranks.broadcast(
        ranks.run_long("choose kernels", lambda: names or (select().names if ranks.is_main else {}))
    )
    return ranks.run_on_all(lambda: select(names=known or None))
