"""Weights of a blend as whole numbers, and what is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.errors import BadRecipe
from armillary.spec.recipe import load_recipe, recipe_from_dict, to_dict, to_toml
from armillary.spec.tables.train import LONGEST, Data, shares


def test_decimals_become_the_smallest_whole_numbers_in_the_order_of_names() -> None:
    assert shares({"web": 0.7, "books": 0.3}) == (("books", 3), ("web", 7))
    assert shares({"a": 2, "b": 4}) == (("a", 1), ("b", 2))
    assert shares({"a": 1e-3, "b": 1}) == (("a", 1), ("b", 1000))
    assert shares({"a": 5}) == (("a", 1),)


@settings(deadline=None)
@given(weights=st.lists(st.integers(1, 300).map(lambda n: n / 100), min_size=1, max_size=5))
def test_proportions_stay_exact(weights: list[float]) -> None:
    found = [count for _, count in shares({str(i): weight for i, weight in enumerate(weights)})]
    hundredths = [round(100 * weight) for weight in weights]
    assert all(a * hundredths[0] == b * found[0] for a, b in zip(found, hundredths, strict=True))


@pytest.mark.parametrize(
    ("blend", "sentence"),
    [
        ({"a": 0.0}, "the weight 0 of 'a' in data.blend must be above 0; leave the source out"),
        ({"a": -1.0, "b": 1}, "the weight -1 of 'a' in data.blend must be above 0; leave the source out"),
        ({"a": float("nan")}, "the weight nan of 'a'"),
        ({" ": 1}, "a source of data.blend has no name"),
        ({"a": 1234567, "b": 7654321}, 'repeat only after 8,888,888 rows; round them, as in { "a" = 139, "b" = 861 }'),
    ],
)
def test_refused(blend: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        Data(blend=blend)
    assert sentence in str(caught.value)


def test_the_rounded_weights_are_accepted() -> None:
    assert sum(count for _, count in shares({"a": 139, "b": 861})) <= LONGEST


def test_from_toml_and_from_set_and_back(tmp_path) -> None:
    path = tmp_path / "r.toml"
    path.write_text('[model]\nname = "armillary-2m"\n[data]\nblend = { stdlib = 3, "books/*.jsonl" = 1.5 }\n')
    recipe = load_recipe(path)
    assert recipe.data.blend == {"stdlib": 3.0, "books/*.jsonl": 1.5}
    path.write_text(to_toml(recipe))
    assert load_recipe(path) == recipe
    assert recipe_from_dict(to_dict(recipe)) == recipe
    assert load_recipe(path, ["data.blend.stdlib=1"]).data.blend == {"stdlib": 1.0, "books/*.jsonl": 1.5}
    assert load_recipe(path, ['data.blend={a=1, "b/c.d"=2}']).data.blend == {"a": 1.0, "b/c.d": 2.0}
    alone = load_recipe(path, ["data.source=a.txt"]).data
    assert (alone.source, alone.blend) == ("a.txt", {})


def test_a_blend_stands_alone() -> None:
    for other in ({"source": "a.txt"}, {"path": "shards"}):
        with pytest.raises(BadRecipe, match=r"data.blend and data.\w+=\S+ exclude each other; make it one of"):
            Data(blend={"a": 1}, **other)
    with pytest.raises(BadRecipe, match=r"data.paths=\('x',\) must be one folder for each source of data.blend \(2\)"):
        Data(blend={"a": 1, "b": 2}, paths=("x",))
