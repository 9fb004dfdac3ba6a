"""A training step of ours, made of the parts that the training loop uses, for train_one_gpu.py and lora_gpu.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from train_peers import SEQUENCE, drawn

from armillary.kernels.optimizer.adamw import gradient_norm
from armillary.model.transformer import Transformer, build
from armillary.parallel.recompute import recompute
from armillary.spec.layout import Layout
from armillary.spec.model import ModelConfig
from armillary.spec.tables.train import TrainJob
from armillary.store.home import Home
from armillary.training.setup.kernel_selection import use_kernels
from armillary.training.step.lora import add_lora, base_dtype
from armillary.training.step.optimizer import make_optimizer, set_learning_rate

SMALL: dict[str, Any] = {
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 8192,
    "vocab": 32000,
    "context": SEQUENCE,
    "num_layers": 16,
}
LARGE: dict[str, Any] = SMALL | {"hidden": 3072, "heads": 24, "num_layers": 28}


class Ours:
    """Model, kernels, optimiser and tokens; called, it takes one step."""

    def __init__(
        self,
        config: ModelConfig,
        home: Home,
        *,
        rows: int,
        kind: str = "none",
        every: int = 1,
        micro_batches: int = 1,
        tokens: Callable[[ModelConfig, int], list[Tensor]] = drawn,
        names: dict[str, str] | None = None,
        run_steps: int = 1000,
        timed: bool = True,
        precision: str = "bf16",
        scaling: str = "token",
        sequence: int = SEQUENCE,
        **job: Any,
    ) -> None:
        """`home` keeps the kernels that were chosen, for the next of the same shapes; `names` leaves nothing to choose.
        Products are timed for runs that last: `run_steps` says how long this one is. `timed` False takes the first
        kernels that agree. `job` are further settings of the job, adapters for example."""
        self.config, self.micro_batches, self.done = config, micro_batches, 0
        batch_tokens = rows * sequence * micro_batches
        self.job = TrainJob(sequence=sequence, batch_tokens=batch_tokens, steps=run_steps, **job)
        how: dict[str, Any] = {"recompute": kind, "recompute_every": every, "fp8_scaling": scaling}
        self.layout = Layout(micro_batch=rows, precision=precision, **how)  # type: ignore[arg-type]
        self.model = random_model(config, base_dtype(self.job, precision))
        add_lora(self.model, self.job, precision=precision)
        begin = time.perf_counter()
        how = {"home": home, "names": names, "timed": timed}
        self.choices = use_kernels(self.model, job=self.job, layout=self.layout, **how)
        self.choose_s = time.perf_counter() - begin
        recompute(self.model, kind=kind, interval=every)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.model, self.job, precision, self.choices.copies)
        set_learning_rate(self.optimizer, 1e-4)
        self.batches = tokens(config, rows) if sequence == SEQUENCE else drawn(config, rows, 16, sequence)
        self.positions = torch.arange(sequence, device="cuda").expand(rows, -1).contiguous()
        self.gradient_bytes = 0

    def forward_backward(self) -> Tensor:
        total = torch.zeros((), device="cuda")
        for _ in range(self.micro_batches):
            tokens = self.batches[self.done % len(self.batches)]
            self.done += 1
            with torch.autocast("cuda", torch.bfloat16):
                hidden = self.model(tokens[:, :-1], self.positions, self.choices.attend(None))
                chunk = self.job.chunk_tokens(self.config.vocab)
                loss = self.choices.loss(self.model, hidden, tokens[:, 1:], chunk=chunk)
            loss = loss / (tokens[:, 1:].numel() * self.micro_batches)
            loss.backward()
            total += loss.detach()
        return total

    def __call__(self) -> Tensor:
        loss = self.forward_backward()
        norm = gradient_norm(self.parameters)
        self.optimizer.step(scale=(1.0 / norm).clamp(max=1.0))  # type: ignore[call-arg]
        self.gradient_bytes = bytes_of(p.grad for p in self.parameters)
        self.optimizer.zero_grad()
        return loss

    def memory(self) -> dict[str, float]:
        """GB by what it is for; the rest of the peak is activations and what kernels need in passing."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        held = {
            "weights": bytes_of(self.model.parameters()),
            "copies": bytes_of(self.choices.copies.values()),
            "gradients": self.gradient_bytes,
            "optimizer": bytes_of(states),
        }
        held["activations"] = torch.cuda.max_memory_allocated() - sum(held.values())
        return {name: round(size / 1e9, 2) for name, size in held.items()}


def bytes_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None and tensor.is_cuda)


@torch.no_grad()
def random_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Initial weights as `Transformer.initialize` has them, but drawn on the device."""
    model = build(config, dtype=dtype, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for name, parameter in model.named_parameters():
        into_residual = name.endswith(("out.weight", "down.weight"))
        width = 0.02 / ((2 * config.num_layers) ** 0.5 if into_residual else 1)
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, width, generator=generator)
    return model
