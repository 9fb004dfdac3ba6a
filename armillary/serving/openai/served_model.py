"""The served model: its name, tokenizer, engine and limits."""

from dataclasses import dataclass, field, replace
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
    adapter: str = ""  # the engine's key of the LoRA adapter that `name` stands for

    @property
    def max_model_len(self) -> int:
        started = self.engine.started
        return self.context if started is None else started.max_model_len

    def check_name(self, name: Any) -> None:
        """Problem 404 where a request names another model."""
        if name and name != self.name and name not in self.engine.adapters.loaded:
            adapters = "".join(f" or '{other}'" for other in list(self.engine.adapters.loaded)[:3])
            text = f"no model '{name}' on this server; use '{self.name}'{adapters}"
            raise Problem(404, text, param="model", code="model_not_found")

    def for_name(self, name: Any) -> "ServedModel":
        """This model, or with the LoRA adapter of that name."""
        adapter = None if not name or name == self.name else self.engine.adapters.loaded.get(name)
        return self if adapter is None else replace(self, name=str(name), adapter=adapter.key)

    def cards(self) -> list[dict[str, Any]]:
        """The entries of /v1/models: the model and its adapters."""
        own = self.card()
        adapters = self.engine.adapters.loaded.items()
        return [own, *(own | {"id": name, "root": str(each.folder), "parent": self.name} for name, each in adapters)]

    def card(self) -> dict[str, Any]:
        """Its entry of /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "armillary",
            "max_model_len": self.max_model_len,
        }
