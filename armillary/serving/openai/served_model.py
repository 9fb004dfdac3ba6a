"""The served model: its name, tokenizer, engine and limits."""

from dataclasses import dataclass, field
from typing import Any, Literal

from armillary.model.generation_config import SamplingDefaults
from armillary.model.pooling_config import PoolingConfig
from armillary.serving.http.problem import Problem
from armillary.serving.openai.tokenization import Tokenization
from armillary.serving.processes.engine_client import EngineClient
from armillary.spec.tables.serve import Serve


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One model with its tokenizer, engine and limits. `context` is its max_model_len until the engine reports its own,
    `tools` the format of its tool calls, `created` a Unix time."""

    name: str
    tokenization: Tokenization
    engine: EngineClient
    serve: Serve
    context: int
    tools: str | None = None
    reasoning: str | None = None  # format of its reasoning; none: it is part of the text
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    scoring: Literal["embedding", "yes_no"] = "embedding"
    hidden: int = 0  # numbers of an embedding
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    created: int = 0

    @property
    def max_model_len(self) -> int:
        started = self.engine.started
        return self.context if started is None else started.max_model_len

    def check_name(self, name: Any) -> None:
        """Problem 404 where a request names another model."""
        if name and name != self.name:
            raise Problem(
                404, f"no model '{name}' on this server; use '{self.name}'", param="model", code="model_not_found"
            )

    def card(self) -> dict[str, Any]:
        """Its entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "armillary",
            "max_model_len": self.max_model_len,
        }
