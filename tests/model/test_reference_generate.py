"""Plain generation: greedy equals transformers, batches do not disturb each other, bad prompts are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from armillary.engine.request.sampling_params import Sampling
from armillary.errors import BadInput
from armillary.model.text.train_tokenizer import train_tokenizer
from armillary.model.transformer import build
from armillary.model.weights.hf_weights import load_model, save_model
from tests.model.families import FAMILIES, GATED, random_model
from tests.model.layers.test_attention_forms import small
from tests.model.plain_generation import generate_tokens, plain_completions

GREEDY = Sampling(max_tokens=12, temperature=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(family: str, tmp_path: Path) -> None:
    theirs = random_model(family, 12 if family in GATED else 11)  # of seed 11 the end token comes first
    theirs.save_pretrained(tmp_path / "m")
    prompt = torch.randint(3, theirs.config.vocab_size, (1, 9), generator=torch.Generator().manual_seed(2))
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, min_new_tokens=12
    )
    # min_new_tokens forbids the end token there; here nothing stops, so compare up to where it would have come
    made = generate_tokens(load_model(tmp_path / "m"), prompt.tolist(), GREEDY)[0]
    upto = made.index(2) if 2 in made else 12
    assert made[:upto] == expected[0, 9 : 9 + upto].tolist()
    assert upto >= 3


def test_a_prompt_is_not_disturbed_by_its_neighbours() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    together = generate_tokens(model, prompts, Sampling(max_tokens=10, temperature=1.0, top_k=20, seed=5))
    alone = [
        generate_tokens(model, [prompt], Sampling(max_tokens=10, temperature=1.0, top_k=20, seed=5 + i))[0]
        for i, prompt in enumerate(prompts)
    ]
    assert together == alone


def test_a_stop_id_ends_one_sequence_and_not_the_others() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    free = generate_tokens(model, [[1], [2]], GREEDY)
    stop = free[0][4]
    stopped = generate_tokens(model, [[1], [2]], GREEDY, stop_ids=[stop])
    assert stopped[0] == free[0][: free[0].index(stop) + 1]
    assert stopped[1] == (free[1][: free[1].index(stop) + 1] if stop in free[1] else free[1])


def test_tokens_are_reported_as_they_come() -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    seen: list[tuple[int, int]] = []
    made = generate_tokens(model, [[1], [2]], GREEDY, on_token=lambda i, token: seen.append((i, token)))
    assert [token for i, token in seen if i == 1] == made[1]


@pytest.mark.parametrize("limits", [{"top_k": 1}, {"top_p": 1e-9}])
def test_the_narrowest_sampling_is_greedy(limits: dict[str, float]) -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    narrow = Sampling(max_tokens=12, temperature=1.0, seed=9, **limits)  # type: ignore[arg-type]
    assert generate_tokens(model, [[1, 2]], narrow) == generate_tokens(model, [[1, 2]], GREEDY)


def test_text_to_text_from_a_folder(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["def main():\n    return 0\n"] * 20, 300)
    tokenizer.save(tmp_path / "tokenizer")
    model = build(small(vocab=tokenizer.vocab_size), dtype=torch.float32, device="cpu", seed=3)
    folder = save_model(model, tmp_path / "m", template=tmp_path / "tokenizer")
    made = plain_completions(folder, ["def main", "return"], Sampling(max_tokens=5, seed=1))
    assert [len(tokens) <= 5 for tokens, _, _ in made] == [True, True]
    assert made == plain_completions(folder, ["def main", "return"], Sampling(max_tokens=5, seed=1))
    assert made[0][2] in ("length", "stop")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], "no prompt"),
        ([[]], "prompt 1 is empty"),
        ([[1], [50]], "prompt 2 has token 50 outside the model's vocabulary of 50"),
        ([[-1]], "token -1 outside"),
        ([[1] * 60], "exceed the context of 64; ask for at most 4"),
    ],
)
def test_a_bad_prompt_is_one_line(prompts: list[list[int]], expected: str) -> None:
    model = build(small(), dtype=torch.float32, device="cpu", seed=3)
    with pytest.raises(BadInput, match=expected):
        generate_tokens(model, prompts, GREEDY)


def test_impossible_sampling_is_refused() -> None:
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_tokens": 0}):
        with pytest.raises(BadInput):
            Sampling(**wrong)  # type: ignore[arg-type]
