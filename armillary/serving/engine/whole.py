"""A single sequence's step in one launch: whether the model can, and its weights as that launch takes them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from armillary.kernels.note import note_once
from armillary.kernels.qkv_cache import QkvOptions
from armillary.kernels.whole_step import StepLayer, StepModel, StepPlace, WholeStep, refuses
from armillary.serving.engine.forward import Forward, alone
from armillary.serving.engine.layer import Dense, Layer
from armillary.serving.engine.step import Shape

Make = Callable[[StepModel, Tensor, Tensor, Tensor, StepPlace], WholeStep]


def whole_step(forward: Forward, make: Make) -> Callable[[Tensor], Tensor] | None:
    """The launch; none, and why is said once, where the model is not of the kind it was made for. Called once all
    products are as they will stay."""
    why = _unusual(forward)
    if why is None:
        model, rows = _model(forward), forward.rows
        why = refuses(model, rows.blocks)
        if why is None:
            parts = Shape(1, 1, 1, True).parts()
            names = {"row": "rows_B", "position": "positions_T", "angle": "angles_T", "slot": "slots_GT",
                     "length": "lengths_B"}  # fmt: skip
            place = StepPlace(**{key: parts[name][0] for key, name in names.items()})
            return make(model, rows.blocks, rows.tables_GRP[0], rows.tokens_RT, place)
    note_once(f"single sequences are decoded kernel by kernel, not in one launch: {why}")
    return None


def _unusual(forward: Forward) -> str | None:
    """What the launch does not know; weights and sizes are looked at by itself."""
    config, model, layers = forward.model.config, forward.model, forward.layers
    heads, options = layers[0].heads, layers[0].options
    extras = (options.softcap, options.sinks_N, options.slopes_N, options.scales_2K, heads.clip)
    plain = all(isinstance(p, Dense) and p.bias is None for layer in layers for p in _products(layer))
    found = {
        "the model is cut over ranks": forward.reduce is not alone or _function(forward.head) is not type(model).head,
        "products have biases or quantised weights": not plain or (model.output is not None
                                                                   and model.output.bias is not None),
        "its layers differ in what they see": any(x.group or x.sliding or x.options.window for x in layers),
        "attention has caps, sinks, slopes or scales": any(x is not None for x in extras),
        "queries and keys have another norm": not _usual_norm(forward, heads),
        "positions are not rotary, or interleaved": (forward.angles is None or heads.interleaved
                                                     or not all(layer.rotates for layer in layers)),
        "embedding or logits are scaled": (config.embedding_scale != 1.0 or config.logit_scale != 1.0
                                           or config.logit_softcap is not None),
        "its norms differ": model.norm is None or model.position_embedding is not None or len(_eps(forward)) > 1,
    }  # fmt: skip
    return next((why for why, so in found.items() if so), None)


def _function(method: object) -> object:
    return getattr(method, "__func__", None)


def _usual_norm(forward: Forward, heads: QkvOptions) -> bool:
    """None, or the RMS norm of each head."""
    if forward.into_cache is not forward.kernels.qkv_cache:
        return False
    weighted = heads.q_weight is not None and heads.k_weight is not None
    return heads.norm == "none" or (heads.norm == "rms" and weighted and not heads.plus_one)


def _products(layer: Layer) -> tuple[object, ...]:
    return layer.qkv, layer.out, layer.up, layer.down


def _eps(forward: Forward) -> set[float]:
    norms = [norm for layer in forward.layers for norm in layer.norms.values() if norm is not None]
    return {norm.eps for norm in [*norms, forward.model.norm] if norm is not None}


def _model(forward: Forward) -> StepModel:
    model, first = forward.model, forward.layers[0]
    assert forward.angles is not None and model.embedding is not None and model.norm is not None
    cos, sin = forward.angles[False]
    output = model.embedding.weight if model.output is None else model.output.weight
    assert model.norm.weight is not None
    return StepModel(
        layers=[_layer(layer) for layer in forward.layers], embedding=model.embedding.weight, norm=model.norm.weight,
        output=output, cos=cos, sin=sin, heads=model.config.heads, scale=first.options.scale, eps=model.norm.eps,
        qk_eps=first.heads.eps,
    )  # fmt: skip


def _layer(layer: Layer) -> StepLayer:
    weights = []
    for product in _products(layer):
        assert isinstance(product, Dense)
        weights.append(product.weight)
    first, second = layer.norms["attention_norm"], layer.norms["mlp_norm"]
    assert first is not None and second is not None and first.weight is not None and second.weight is not None
    normed = layer.heads.norm == "rms"
    return StepLayer(
        qkv=weights[0], out=weights[1], up=weights[2], down=weights[3], attention_norm=first.weight,
        mlp_norm=second.weight, q_norm=layer.heads.q_weight if normed else None,
        k_norm=layer.heads.k_weight if normed else None,
    )  # fmt: skip
