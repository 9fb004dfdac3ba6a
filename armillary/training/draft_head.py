"""Trains a draft head for a model: one layer on its last hidden states and the embeddings of the tokens that follow,
which predicts one token further through the model's own head (`model.multi_token`).

The model is frozen. The head learns the model's distribution of the token after next, as EAGLE does (Li et al., arXiv
2401.15077), and, as in the engine, continues from its own hidden states (arXiv 2503.01840, section 3.2): at depth d it
gets those of depth d − 1, one place further.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from armillary.kernels.core.dtype import widen
from armillary.model.multi_token import MtpLayer
from armillary.model.random_values import all_of, fill_normal
from armillary.model.transformer import Block, Transformer
from armillary.spec.tables.train import TrainJob
from armillary.training.data.batch import IGNORED
from armillary.training.data.loader import DeviceBatch, to_device
from armillary.training.open_data import OpenData
from armillary.training.setup.kernel_selection import Choices
from armillary.training.step.numerics import autocast
from armillary.training.step.optimizer import learning_rate, make_optimizer, set_learning_rate

# B batch, T tokens, H hidden, V vocabulary, M tokens of all rows that count

DEPTHS = 3
"""draft tokens in a row that the head is trained for"""
_DECAY = 0.8  # weight of each depth over that before it: a draft token counts only where those before it are accepted


@dataclass(frozen=True, kw_only=True)
class HeadStep:
    """One step. Of each depth: how likely a draft token drawn at temperature 1 is accepted, Σ min(p, q), and how often
    the likeliest token is the model's, each where those before it are the text's."""

    step: int
    loss: float
    accepted: tuple[float, ...]
    agreed: tuple[float, ...]


@torch.no_grad()
def new_draft_head(model: Transformer, *, seed: int = 0) -> MtpLayer:
    """Begins as the model's last layer with attention, on its last hidden state: the join passes that on, and little of
    the embedding."""
    config, weight = model.config, next(model.parameters())
    head = MtpLayer(config).to(device=weight.device, dtype=torch.float32)
    last = max(i for i, kind in enumerate(config.layers) if kind == config.mtp_kind)
    source = model.blocks[str(last)]
    assert isinstance(source, Block)
    head.block.load_state_dict(source.state_dict())
    for norm in (head.embedding_norm, head.hidden_norm):
        norm.reset()
    if model.norm is None:
        head.norm.reset()
    else:
        head.norm.load_state_dict(model.norm.state_dict())
    of_embedding, of_hidden = head.join.weight.chunk(2, dim=1)
    fill_normal(all_of(of_embedding), seed=seed, name="join.weight", std=0.02)
    of_hidden.copy_(torch.eye(config.hidden))
    return head


class HeadTrainer:
    """`steps()` trains; `validate()` measures on held-out text."""

    def __init__(self, model: Transformer, data: OpenData, job: TrainJob, *, micro_batch: int, precision: str) -> None:
        self.model, self.data, self.job = model.requires_grad_(False).eval(), data, job
        self.micro_batch, self.precision = micro_batch, precision
        self.device = next(model.parameters()).device
        self.head = new_draft_head(model, seed=job.seed)
        self.num_parameters = sum(parameter.numel() for parameter in self.head.parameters())
        self.optimizer = make_optimizer(self.head, job)

    def steps(self) -> Iterator[HeadStep]:
        for step in range(self.job.steps):
            set_learning_rate(self.optimizer, learning_rate(self.job, step, self.num_parameters))
            sums = self._forward(to_device(self.data.train.at(step), self.device), Tensor.backward)
            nn.utils.clip_grad_norm_(self.head.parameters(), self.job.clip or float("inf"))
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield _means(step, sums)

    @torch.no_grad()
    def validate(self) -> HeadStep | None:
        """None where no text is held out."""
        total = torch.zeros(DEPTHS, 4, dtype=torch.float64)
        rows, limit = self.data.train.batch, self.job.eval_batches
        for batch in self.data.validation.batches(rows=rows, limit=limit, rank=0, world=1):
            total += self._forward(to_device(batch, self.device), lambda loss: None)
        return _means(self.job.steps, total) if total[0, 3] else None

    def _forward(self, batch: DeviceBatch, done: Callable[[Tensor], object]) -> Tensor:
        """[depths, (loss, accepted, agreed, tokens)], summed; `done` gets the mean loss of each micro-batch."""
        total = torch.zeros(DEPTHS, 4, dtype=torch.float64)
        for part in batch.micro(self.micro_batch):
            with autocast(self.precision, self.device):
                sums = self._sums(part)
            done(
                (sums[:, 0] / sums[:, 3].clamp_min(1.0) * _weights(sums)).sum()
                * len(part.row_targets)
                / len(batch.row_targets)
            )
            total += sums.detach().double().cpu()
        return total

    def _sums(self, batch: DeviceBatch) -> Tensor:
        tokens_BT, positions_BT, documents_BT = batch.tokens_BT, batch.positions_BT, batch.documents_BT
        with torch.no_grad():
            attend = Choices().attend(documents_BT if batch.has_documents else None)
            own_BTH = self.model(tokens_BT, positions_BT, attend)
        hidden_BTH, sums = own_BTH[:, :-1], []
        for depth in range(DEPTHS):
            at = positions_BT[:, depth:-1]
            attend = Choices().attend(documents_BT[:, depth:-1] if batch.has_documents else None)
            cos_sin = self.model.rotary(at) if self.model.rotary is not None else None
            embedded_BTH = self.model.embed(tokens_BT[:, depth + 1 :], at)
            hidden_BTH = self.head(hidden_BTH, embedded_BTH, cos_sin, attend, 0)
            counts_BT = (documents_BT[:, : -depth - 1] == documents_BT[:, depth + 1 :]) & (
                batch.targets_BT[:, depth + 1 :] != IGNORED
            )
            sums.append(self._compare(hidden_BTH[counts_BT], own_BTH[:, depth + 1 :][counts_BT]))
            hidden_BTH = hidden_BTH[:, :-1]
        return torch.stack(sums)

    def _compare(self, drafts_MH: Tensor, own_MH: Tensor) -> Tensor:
        """Summed over tokens: cross entropy, Σ min(p, q), whether the likeliest is the same, and 1; logits of a chunk
        exist at once."""
        size = self.job.chunk_tokens(self.model.config.vocab) or max(1, len(own_MH))
        sums = drafts_MH.new_zeros(4, dtype=torch.float32)
        for drafts_mH, own_mH in zip(drafts_MH.split(size), own_MH.split(size), strict=True):
            if torch.is_grad_enabled():
                sums = sums + checkpoint(self._compared, drafts_mH, own_mH, use_reentrant=False)
            else:
                sums = sums + self._compared(drafts_mH, own_mH)
        return sums

    def _compared(self, drafts_mH: Tensor, own_mH: Tensor) -> Tensor:
        with torch.no_grad():
            wanted_mV = F.softmax(widen(self.model.head(own_mH)), dim=-1)
        logs_mV = F.log_softmax(widen(self.model.head(drafts_mH)), dim=-1)
        accepted = torch.minimum(wanted_mV, logs_mV.detach().exp()).sum()
        agreed = (wanted_mV.argmax(-1) == logs_mV.argmax(-1)).sum()
        count = torch.tensor(float(len(own_mH)), device=logs_mV.device)
        return torch.stack((-(wanted_mV * logs_mV).sum(), accepted, agreed.float(), count))


def _weights(sums: Tensor) -> Tensor:
    return _DECAY ** torch.arange(len(sums), device=sums.device)


def _means(step: int, sums: Tensor) -> HeadStep:
    means = sums[:, :3] / sums[:, 3:].clamp_min(1.0)
    loss = float((means[:, 0] * _weights(sums)).sum())
    return HeadStep(step=step, loss=loss, accepted=tuple(means[:, 1].tolist()), agreed=tuple(means[:, 2].tolist()))
