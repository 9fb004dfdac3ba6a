"""What endpoints need to know of the model that is served."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from armillary.model.generation_config import SamplingDefaults
from armillary.serving.http.problem import Problem
from armillary.serving.openai.tokenization import Texts
from armillary.serving.processes.engine_client import EngineProcess
from armillary.spec.tables.serve import Serve


@dataclass(frozen=True, kw_only=True)
class Served:
    """One model, its tokenizer and its engine."""

    name: str
    """as clients call it"""
    texts: Texts
    engine: EngineProcess
    serve: Serve
    """limits"""
    context: int
    """what prompt and answer may have together, before the engine has said so"""
    tools: str | None = None
    """how its tool calls are written; none: it knows none"""
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """sampling parameters that requests leave out"""
    created: int = 0
    """when it was loaded, in seconds since 1970"""

    @property
    def max_model_len(self) -> int:
        started = self.engine.started
        return self.context if started is None else started.max_model_len

    def check_name(self, asked: Any) -> None:
        """Problem 404 where another model is asked for."""
        if asked and asked != self.name:
            raise Problem(404, f"no model '{asked}' here; use '{self.name}'", param="model", code="model_not_found")

    def card(self) -> dict[str, Any]:
        """Its entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "armillary",
            "max_model_len": self.max_model_len,
        }
