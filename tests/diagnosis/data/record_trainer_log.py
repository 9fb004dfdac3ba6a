"""Records hf_trainer_eval_often.log and hf_trainer_state.json: the Hugging Face Trainer as it prints, validating often.

Needs transformers and accelerate. `python tests/diagnosis/data/record_trainer_log.py 2>&1 | tee
tests/diagnosis/data/hf_trainer_eval_often.log` records it again, in a minute; the state is copied beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

VOCABULARY, LENGTH = 500, 32


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=120,
            per_device_train_batch_size=8,
            logging_steps=5,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=60,
            report_to=[],
            use_cpu=True,
            per_device_eval_batch_size=8,
        )
        trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=Rows(2000), eval_dataset=Rows(200))
        trainer.train()
        state = Path(folder) / "checkpoint-120" / "trainer_state.json"
        shutil.copy(state, Path(__file__).with_name("hf_trainer_state.json"))


if __name__ == "__main__":
    main()
