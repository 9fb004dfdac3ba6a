"""Tasks through the engine: likelihoods are the model's own, every token of a long text is predicted once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from armillary.engine.llm import LLM
from armillary.engine.lm_eval_model import generations, likelihoods, need_lm_eval, rolling_pairs, run_tasks
from armillary.errors import BadInput, MissingPart
from armillary.model.weights.hf_weights import load_model
from armillary.spec.tables.serve import Serve
from tests.model.quantizing.tiny_source import write_source
from tests.model.test_agreement import full_logits

SERVE = Serve(kv_bytes=200_000, max_running=4, dtype="fp32")
TASK = """task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
metadata: {{version: 1}}
"""


@torch.no_grad()
def test_likelihoods_are_those_of_the_model(tmp_path: Path) -> None:
    folder = write_source(tmp_path, dtype="fp32").folder
    assert folder is not None
    llm, model = LLM(folder, SERVE, device="cpu"), load_model(folder, dtype="fp32")
    pairs = [([1, 9, 30], [40, 41]), ([0, 5], [7]), (list(range(4, 90)), [8, 8, 8])]
    found = likelihoods(llm, pairs, 64)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        tokens = torch.tensor((context + continuation)[-63:])
        scores = full_logits(model, tokens[None])[0, :-1].log_softmax(-1)[-len(continuation) :]
        expected = scores.gather(1, torch.tensor(continuation)[:, None]).sum()
        assert value == pytest.approx(float(expected), abs=1e-3)
        assert greedy == (scores.argmax(-1).tolist() == continuation)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    (text,) = generations(llm, [("def f_", {"until": ["\n"], "max_gen_toks": 5})], tokenizer.encode, 64)
    assert "\n" not in text


def test_every_token_of_a_text_is_predicted_once() -> None:
    for count in (1, 5, 8, 9, 40):
        ids = list(range(100, 100 + count))
        pairs = rolling_pairs(ids, 0, 10)
        assert [token for _, part in pairs for token in part] == ids
        assert all(len(context) + len(part) <= 9 and context for context, part in pairs)
    assert rolling_pairs([], 0, 10) == []


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPart, match="pip install lm-eval"):
        need_lm_eval()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_tasks_of_lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    folder = write_source(tmp_path, dtype="fp32").folder
    llm = LLM(folder or "", SERVE, device="cpu")
    questions = [
        {"question": "def f_1(x):", "choices": ["\n    return x", " zz"], "answer": 0},
        {"question": "return x * ", "choices": ["12", "naïve 漢字"], "answer": 1},
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    right = 0
    for each in questions:
        pairs = [
            (tokenizer.encode(each["question"], special=False), tokenizer.encode(c, special=False))
            for c in each["choices"]
        ]  # type: ignore[arg-type]
        values = [value for value, _ in likelihoods(llm, pairs, 64)]
        right += values.index(max(values)) == each["answer"]
    found = run_tasks(llm, [str(tmp_path / "tiny.yaml")])
    assert found["tiny_choice"]["acc"] == right / 2
    with pytest.raises(BadInput, match="knows no task"):
        run_tasks(llm, ["no_such_task"])
