"""How the hidden states of a prompt become one vector: no token is generated."""

from dataclasses import dataclass
from typing import Literal

from armillary.errors import BadInput

PoolingMode = Literal["last", "mean", "cls", "logits"]


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """What a request wants of its prompt instead of a completion."""

    mode: PoolingMode = "last"
    """hidden state, after the last norm, of the last token, the mean of all tokens, or of the first (cls); logits: of
    the token after the prompt"""
    token_ids: tuple[int, ...] = ()
    """logits: the tokens whose logits are wanted"""

    def __post_init__(self) -> None:
        if (self.mode == "logits") != bool(self.token_ids):
            raise BadInput("pooling has token_ids where its mode is logits, and only there; correct the request")

    @property
    def needs_every_token(self) -> bool:
        """Whether no token of the prompt may be taken from the prefix cache."""
        return self.mode in ("mean", "cls")
