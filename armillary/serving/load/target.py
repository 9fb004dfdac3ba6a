"""The server under test: its address, the form of request it takes, and what was learnt of it beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from armillary.errors import BadInput

Api = Literal["chat", "completions", "predict"]
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "predict": "/predict"}


@dataclass(frozen=True, kw_only=True)
class Target:
    """How requests to this server look."""

    base: str
    """address without /v1"""
    model: str
    """name it knows the model by"""
    api: Api = "chat"
    """form of request"""
    key: str = ""
    """API key; empty: none is sent"""
    usage: bool = True
    """whether it takes stream_options and then counts tokens"""
    exact: bool = True
    """whether it takes ignore_eos, with which answers have the length asked for"""
    temperature: float = 0.0
    """of sampling"""
    sample: bytes = b""
    """predict: the request, the same each time"""

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
        words = {"messages": [{"role": "user", "content": prompt}]} if self.api == "chat" else {"prompt": prompt}
        found: dict[str, Any] = {
            "model": self.model,
            **words,
            "max_tokens": tokens_out,
            "stream": True,
            "temperature": self.temperature,
        }
        if self.usage:
            found["stream_options"] = {"include_usage": True}
        if self.exact:
            found["ignore_eos"] = True
        return json.dumps(found).encode()


def base_url(text: str) -> str:
    """'localhost:8000', 'http://host/v1/' -> an address without /v1."""
    whole = text if "://" in text else f"http://{text}"
    parts = urlsplit(whole)
    try:
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535
        known = False
    if not known:
        raise BadInput(f"'{text}' is not an address of a server; give one like http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
