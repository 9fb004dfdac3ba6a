"""Speed: tokens a second, and the share of the chip's dense peak that the model's own arithmetic is."""

from __future__ import annotations

from armillary.spec.arithmetic.mfu import model_flops_per_token
from armillary.spec.arithmetic.params import parameters
from armillary.spec.lora import adapter_weights
from armillary.spec.plan import Plan


class Speed:
    """Of one run: `gauges(seconds)` of a step."""

    def __init__(self, plan: Plan) -> None:
        assert plan.train is not None
        self._tokens, self._devices = plan.train.batch_tokens, plan.layout.num_devices
        self._flops = _flops_per_token(plan)
        chip = plan.cluster.chip
        self._peak = chip.flops.get("bf16") if chip.kind != "cpu" else None

    def gauges(self, seconds: float, data_wait_s: float) -> dict[str, float]:
        """MFU only where the chip's peak is known: by the convention its dense 16-bit peak, whatever the precision."""
        rate = self._tokens / seconds
        each = rate / self._devices
        found = {
            "step_s": seconds,
            "data_wait_s": data_wait_s,
            "data_wait_fraction": min(1.0, data_wait_s / seconds),
            "tokens_per_s": rate,
            "tokens_per_s_per_device": each,
        }
        return found | {"mfu": each * self._flops / self._peak} if self._peak else found


def _flops_per_token(plan: Plan) -> float:
    """By the MFU convention: weights that LoRA freezes count 4 instead of 6, its adapters 6."""
    job = plan.train
    assert job is not None
    if not job.lora_rank:
        return model_flops_per_token(plan.model, job.sequence)
    adapters = adapter_weights(plan.model, rank=job.lora_rank, on=job.lora_on)
    frozen = parameters(plan.model).multiplied
    return model_flops_per_token(plan.model, job.sequence, frozen=frozen, adapters=adapters)
