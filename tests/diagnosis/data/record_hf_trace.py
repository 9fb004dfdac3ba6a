"""Records hf_loop_slow_dataset.json.gz: torch.profiler around a plain training loop with Hugging Face's parts.

Nothing of ours runs here. The loop has the habits of many: num_workers=0 over a dataset that reads slowly, and
loss.item() in every step. `python tests/diagnosis/data/record_hf_trace.py` records it again, in some seconds.
"""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

TO = Path(__file__).with_name("hf_loop_slow_dataset.json.gz")
ROWS, LENGTH, VOCABULARY, READ_S = 8, 64, 1000, 12e-3
SKIPPED, RECORDED = 3, 3


class SlowFiles(Dataset[dict[str, torch.Tensor]]):
    """A file a row, each as slow as a network disk."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(READ_S)
        ids = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(SlowFiles(), batch_size=ROWS, num_workers=0)
    plain = TO.with_suffix("")
    steps = schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=steps,
        record_shapes=True,
        on_trace_ready=lambda found: found.export_chrome_trace(str(plain)),
    ) as recording:
        for step, batch in enumerate(loader):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.3f}")
            recording.step()
            if step == SKIPPED + RECORDED:
                break
    TO.write_bytes(gzip.compress(plain.read_bytes(), 9, mtime=0))
    plain.unlink()
    print(TO, TO.stat().st_size)


if __name__ == "__main__":
    main()
