"""The server under test: its address and the form of its requests."""

import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from armillary.errors import BadInput

Api = Literal["chat", "completions", "predict"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "predict": "/predict"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server and the form of its requests; `base` is its address without /v1."""

    base: str
    model: str
    api: Api = "chat"
    key: str = ""
    usage: bool = True
    """whether it supports stream_options and reports usage"""
    exact: bool = True
    """whether it supports ignore_eos, so that completions have the requested length"""
    temperature: float = 0.0
    sample: bytes = b""
    """predict: the body of every request"""

    @property
    def url(self) -> str:
        return self.base + _PATHS[self.api]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def body(self, prompt: str, tokens_out: int) -> bytes:
        """The JSON of a request."""
        if self.api == "predict":
            return self.sample
        text = {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        table: dict[str, Any] = {
            "model": self.model,
            **text,
            "max_tokens": tokens_out,
            "stream": True,
            "temperature": self.temperature,
        }
        if self.usage:
            table["stream_options"] = {"include_usage": True}
        if self.exact:
            table["ignore_eos"] = True
        return json.dumps(table).encode()


def base_url(text: str) -> str:
    """'localhost:8000', 'http://host/v1/' -> an address without /v1."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535
        valid = False
    if not valid:
        raise BadInput(f"'{text}' is not the address of a server; give one like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
