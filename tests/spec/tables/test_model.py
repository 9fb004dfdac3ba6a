"""Overrides of a model's shape: what is named changes, what must follow follows."""

from __future__ import annotations

from typing import Any

import pytest

from armillary.errors import BadInput, BadModel, BadRecipe
from armillary.spec.model import MLA, LayerKind, ModelConfig, MoE, Rope
from armillary.spec.tables.model import apply_model_overrides, model_table, override_hints, table_to_plain


def model(**changes: Any) -> ModelConfig:
    base: dict[str, Any] = {
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "ffn": 128,
        "vocab": 512,
        "context": 1024,
        "layers": (LayerKind(),) * 4,
    }
    return ModelConfig(**(base | changes))


EXPERTS = MoE(num_experts=8, top_k=2, ffn=32)


def test_nothing_named_changes_nothing() -> None:
    assert apply_model_overrides(model(), {}) == model()


def test_plain_fields_change() -> None:
    changed = apply_model_overrides(model(), {"ffn": 256, "tied": True, "norm": "layer"})
    assert (changed.ffn, changed.tied, changed.norm, changed.hidden) == (256, True, "layer", 64)


def test_depth_continues_the_pattern() -> None:
    kinds = (LayerKind(attention="sliding"), LayerKind()) * 2
    deeper = apply_model_overrides(model(layers=kinds, window=8), {"num_layers": 7})
    assert [kind.attention for kind in deeper.layers[4:]] == ["sliding", "full", "sliding"]
    assert apply_model_overrides(model(), {"num_layers": "2"}).num_layers == 2


def test_pattern_keys_change_only_their_part() -> None:
    kinds = (LayerKind(mlp="moe", rope=False), LayerKind(mlp="dense"))
    config = model(layers=kinds, moe=EXPERTS)
    changed = apply_model_overrides(config, {"attention_pattern": "sliding,full", "window": 16, "num_layers": 3})
    assert [kind.attention for kind in changed.layers] == ["sliding", "full", "sliding"]
    assert [kind.mlp for kind in changed.layers] == ["moe", "dense", "moe"]
    assert [kind.rope for kind in changed.layers] == [False, True, False]
    assert [kind.mlp for kind in apply_model_overrides(config, {"dense_first": 1}).layers] == ["dense", "moe"]
    assert [kind.rope for kind in apply_model_overrides(config, {"nope_every": 2}).layers] == [True, False]


def test_nested_tables_change_single_fields() -> None:
    config = model(layers=(LayerKind(mlp="moe"),) * 4, moe=EXPERTS, rope=Rope(theta=5e5, fraction=0.5))
    changed = apply_model_overrides(config, {"moe": {"top_k": 4}, "rope": {"theta": 1e6}})
    assert changed.moe == MoE(num_experts=8, top_k=4, ffn=32)
    assert changed.rope == Rope(theta=1e6, fraction=0.5)


def test_experts_can_be_given_and_taken() -> None:
    sparse = apply_model_overrides(model(), {"moe": {"num_experts": 8, "top_k": 2, "ffn": 32}, "dense_first": 1})
    assert [kind.mlp for kind in sparse.layers] == ["dense", "moe", "moe", "moe"] and sparse.moe == EXPERTS
    dense = apply_model_overrides(sparse, {"moe": "none"})
    assert dense.moe is None and dense.num_moe_layers == 0
    with pytest.raises(BadInput, match=r"model\.moe lacks num_experts"):
        apply_model_overrides(model(), {"moe": {"top_k": 2, "ffn": 32}})


def test_latent_attention_can_be_given() -> None:
    latent = {"q_rank": None, "kv_rank": 32, "nope_dim": 16, "rope_dim": 8, "v_dim": 16}
    assert apply_model_overrides(model(), {"mla": latent}).mla == MLA(**latent)


def test_head_dim_follows_only_where_it_did() -> None:
    assert apply_model_overrides(model(), {"hidden": 128}).head_dim == 32
    assert apply_model_overrides(model(), {"hidden": 128, "heads": 8}).head_dim == 16
    assert apply_model_overrides(model(), {"hidden": 128, "head_dim": 16}).head_dim == 16
    assert apply_model_overrides(model(head_dim=24), {"hidden": 128}).head_dim == 24
    with pytest.raises(BadModel, match=r"hidden=100 is not a multiple of heads=3; give model\.head_dim"):
        apply_model_overrides(model(kv_heads=1), {"hidden": 100, "heads": 3})


def test_kv_heads_follow_only_where_they_were_all() -> None:
    assert apply_model_overrides(model(kv_heads=4), {"heads": 8}).kv_heads == 8
    assert apply_model_overrides(model(), {"heads": 8}).kv_heads == 2
    with pytest.raises(BadModel, match="do not divide"):
        apply_model_overrides(model(), {"heads": 3, "hidden": 96})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layers": 3}, "unknown key 'layers' in model; did you mean num_layers?"),
        ({"hiden": 3}, "unknown key 'hiden' in model; did you mean hidden?"),
        ({"moe": {"topk": 3}}, "unknown key 'topk' in model.moe; did you mean top_k?"),
        ({"hidden": "wide"}, "model.hidden='wide' is not a whole number"),
        ({"attention_pattern": ["slidng"]}, "did you mean sliding?"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1; try --set model.num_layers=1"),
        ({"moe_every": 0}, "model.moe_every=0 must be at least 1; try --set model.moe_every=1"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        apply_model_overrides(model(), values)
    assert words in str(caught.value)


def test_the_table_is_written_as_it_is_read() -> None:
    written = {"name": "x", "num_layers": 4, "window": "none", "rope": {"theta": 1e6, "original_context": "none"}}
    table = model_table(
        {"name": "x", "num_layers": "4", "window": None, "rope": {"theta": "1e6", "original_context": None}}
    )
    assert table_to_plain(table) == written
    assert model_table(written) == table


def test_which_model_must_be_said_once() -> None:
    for values in ({}, {"name": "a", "path": "b"}, {"name": ""}):
        with pytest.raises(BadRecipe, match="either a name or a path"):
            model_table(values)


def test_every_shape_field_can_be_overridden() -> None:
    assert {"hidden", "rope", "num_layers", "moe_every"} <= set(override_hints())
    assert not {"name", "layers"} & set(override_hints())
