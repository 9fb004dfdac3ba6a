"""Other people's clients against the server: an evaluation harness gets the likelihoods that transformers gives, a load
generator finishes without an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.tiny import Server

pytestmark = pytest.mark.peers
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
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
SAME = "max_length=512,add_bos_token=False"
QUESTIONS = [
    {"question": "def main", "choices": ["():", " return"], "answer": 0},
    {"question": "return", "choices": [" 0", " {"], "answer": 1},
    {"question": "# 0123", "choices": ["4567", "naïve 漢字"], "answer": 0},
]


def run(*words: str) -> None:
    line = [sys.executable, "-m", *words]
    made = subprocess.run(line, capture_output=True, text=True, env=os.environ | OFFLINE, timeout=400)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]


def likelihoods(folder: Path, task: Path, kind: str, arguments: str) -> list[Any]:
    out = task / kind
    run(
        "lm_eval",
        "--model",
        kind,
        "--model_args",
        arguments,
        "--tasks",
        "tiny_choice",
        "--include_path",
        str(task),
        "--batch_size",
        "2",
        "--device",
        "cpu",
        "--log_samples",
        "--output_path",
        str(out),
    )
    (samples,) = out.rglob("samples_tiny_choice*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    return [sample["filtered_resps"] for sample in sorted(found, key=lambda sample: int(sample["doc_id"]))]


def test_an_evaluation_harness_finds_what_transformers_finds(server: Server, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.format(data=data))
    url = f"{server.url}/v1/completions"
    ours = likelihoods(
        folder, tmp_path, "local-completions", f"model=tiny,base_url={url},tokenizer={folder},num_concurrent=2,{SAME}"
    )
    theirs = likelihoods(folder, tmp_path, "hf", f"pretrained={folder},dtype=float32,{SAME}")
    for mine, other in zip(ours, theirs, strict=True):
        for (value, greedy), (expected, also_greedy) in zip(mine, other, strict=True):
            assert float(value) == pytest.approx(float(expected), abs=1e-3) and str(greedy) == str(also_greedy)


def test_a_load_generator_has_no_error(server: Server, folder: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "run",
        "--backend",
        f"kind=openai_http,target={server.url}",
        "--profile",
        "kind=concurrent,streams=4",
        "--constraint",
        "kind=max_requests,count=20",
        "--data",
        "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--tokenizer",
        f"kind=huggingface_auto,model={folder}",
        "--output",
        f"kind=json,path={report}",
        "--disable-console",
    )
    (made,) = json.loads(report.read_text())["benchmarks"]
    totals, tokens = made["metrics"]["request_totals"], made["metrics"]["output_token_count"]["successful"]
    assert totals["successful"] >= 20 and totals["errored"] == 0 and tokens["mean"] == 16
