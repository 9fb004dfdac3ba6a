"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): layers after the last, each of which predicts
one token further.

Layer d joins the hidden state of a position with the embedding of the token d + 1 places later and gives, through the
model's own head, the logits of the token after that. The model itself is complete without them.
"""

import torch
from torch import Tensor, nn

from armillary.model.layers.attention_forms import Attend
from armillary.model.layers.norm import hidden_norm
from armillary.model.layers.rope import CosSin
from armillary.model.transformer import Block
from armillary.spec.model import ModelConfig

# B batch, T tokens, H hidden


class MtpLayer(nn.Module):
    """One multi-token-prediction layer; its block is of the kind of the model's last one, with attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (hidden_norm(config) for _ in range(3))
        self.join = nn.Linear(2 * config.hidden, config.hidden, bias=False)
        self.block = Block(config, config.mtp_kind)

    def forward(
        self, hidden_BTH: Tensor, embedded_BTH: Tensor, cos_sin: CosSin | None, attend: Attend, layer: int
    ) -> Tensor:
        """Normed hidden states, for the head and the next such layer, from those of the layer before (the model's own
        after its last norm) and the embeddings of the tokens that follow."""
        x_BTH = self.block(self.joined(hidden_BTH, embedded_BTH), cos_sin, attend, layer)
        return self.norm(x_BTH)  # type: ignore[no-any-return]

    def joined(self, hidden_BTH: Tensor, embedded_BTH: Tensor) -> Tensor:
        """The input of its block."""
        both = torch.cat((self.embedding_norm(embedded_BTH), self.hidden_norm(hidden_BTH)), dim=-1)
        return self.join(both)  # type: ignore[no-any-return]
