"""The layer of pairs: its parameters are those predicted, documents are apart, and a folder holds it."""

from __future__ import annotations

import pytest
import torch

from armillary.errors import BadModel
from armillary.model.layers.attention_forms import packed, plain
from armillary.model.transformer import Transformer, build
from armillary.model.weights.hf_layout import rules
from armillary.spec.arithmetic.params import parameters
from armillary.spec.hf.config import from_hf, to_hf
from armillary.spec.tables.model import apply_model_overrides
from tests.model.layers.test_attention_forms import small

PAIRS = small(
    num_layers=3,
    attention_pattern=["2-simplicial", "full", "2-simplicial"],
    simplicial={"window_1": 3, "window_2": 7},
    family="simplicial",
    qk_norm="head",
    qkv_bias=True,
    out_bias=True,
    nope_every=3,
)


def test_the_parameters_are_those_predicted() -> None:
    with torch.device("meta"):
        model = Transformer(PAIRS)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(PAIRS).total


def test_documents_of_a_row_are_computed_as_if_alone() -> None:
    model = build(PAIRS, dtype=torch.float64, device="cpu", seed=0)
    tokens_BT = torch.arange(20)[None] % 7
    documents_BT = (torch.arange(20) // 8)[None]
    positions_BT = torch.arange(20)[None] % 8
    together = model(tokens_BT, positions_BT, packed(documents_BT))
    for part in (slice(0, 8), slice(8, 16), slice(16, 20)):
        alone = model(tokens_BT[:, part], positions_BT[:, part], plain)
        torch.testing.assert_close(together[:, part], alone)


def test_a_folder_holds_its_shape_and_its_projections_by_name() -> None:
    assert from_hf(to_hf(PAIRS), name=PAIRS.name) == PAIRS
    model = build(PAIRS, dtype=torch.float32, device="cpu", seed=0)
    rule = next(rule for rule in rules(PAIRS) if rule.name == "blocks.0.attention.qkv.weight")
    fused = model.get_parameter(rule.name)
    assert [name.split(".")[-2] for name in rule.hf_names] == ["q_proj", "k1_proj", "k2_proj", "v1_proj", "v2_proj"]
    parts = rule.split(fused)
    assert torch.equal(rule.join(parts), fused)
    attention = model.blocks["0"].attention
    assert torch.equal(parts[2], fused.unflatten(0, (2, 6, 8))[:, 3].flatten(0, 1))
    assert attention.options().pair_windows == (3, 7)


def test_a_recipe_changes_the_family_where_its_own_cannot_say_it() -> None:
    changes = {"attention_pattern": ["2-simplicial"], "simplicial": {"window_1": 4, "window_2": 16}}
    made = apply_model_overrides(small(), changes)
    assert made.family == "simplicial" and to_hf(made)["layer_types"] == ["simplicial_attention"] * 2


@pytest.mark.parametrize("more", [{"sinks": True}, {"attention_softcap": 2.0}, {"qk_norm": "all"}])
def test_what_pairs_do_not_have_is_refused_in_one_line(more: dict[str, object]) -> None:
    config = small(attention_pattern=["2-simplicial"], simplicial={"window_1": 2, "window_2": 2}, **more)
    with pytest.raises(BadModel, match="2-simplicial attention with more than a scaled softmax cannot be built"):
        build(config, dtype=torch.float32, device="cpu")
