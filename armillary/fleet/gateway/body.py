"""What the gateway reads of a request's body, and the few fields that it changes before it forwards it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from armillary.fleet.gateway.keys import ApiKey
from armillary.serving.http.problem import bad_request

_SEPARATOR = b"\x1e"
_MAX_TOKENS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""paths whose responses have tokens, and their field for the most"""
_TEMPLATE_TOKENS, _MESSAGE_TOKENS = 64, 16
"""most tokens that chat templates add: a default system prompt, and marks around each message"""
_RANKED, _JUDGE_BYTES = ("/v1/rerank", "/v1/score"), 512
"""paths that compare texts, and the bytes around each pair where a model judges it"""
_NO_PROMPT = ("model", "user", "cache_salt", "stop", "stream_options")
"""fields that never become part of a prompt; all others may, as tools, schemas and documents do"""
_TEXTS = (str, list, dict)
_STREAM_OPTIONS = ("/v1/chat/completions", "/v1/completions")
_NOT_SALTED = ("/tokenize", "/detokenize")
"""paths whose requests leave nothing in a prefix cache"""


@dataclass(frozen=True)
class RequestBody:
    """A request for tokens."""

    table: dict[str, Any]
    model: str
    stream: bool
    path: str

    @property
    def generates(self) -> bool:
        """Whether the response has tokens of its own, unlike an embedding."""
        return self.path in _MAX_TOKENS

    @cached_property
    def prompt(self) -> bytes:
        """The text of the prompt, to compare beginnings and to bound its tokens."""
        parts = [
            _text(self.table.get(name))
            for name in ("instructions", "system", "tools", "messages", "prompt", "input", "query", "text_1")
        ]
        return _SEPARATOR.join(part for part in parts if part)

    def most_prompt_tokens(self, bytes_per_token: float) -> int:
        """An upper bound of the prompt's tokens: bytes of its text, and what a chat template adds."""
        messages = self.table.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        texts = (each for name, each in self.table.items() if name not in _NO_PROMPT and isinstance(each, _TEXTS))
        size = sum(len(_text(each)) for each in texts)
        size += self._repeated_bytes()
        return int(size / bytes_per_token) + _TEMPLATE_TOKENS * self._texts + _MESSAGE_TOKENS * count

    @property
    def _texts(self) -> int:
        """Texts that get a template of their own: those of an embedding, and the documents of a ranking."""
        lists = [self.table.get(name) for name in ("input", "documents", "text_2")]
        return max([1, *(len(each) for each in lists if isinstance(each, list))]) if not self.generates else 1

    def _repeated_bytes(self) -> int:
        """A model that judges documents reads query and instruction with each of them."""
        shared = ("query", "instruction", "text_1") if self.path in _RANKED else ()
        return sum(len(_text(self.table.get(name))) for name in shared) * (self._texts - 1) + (
            _JUDGE_BYTES * self._texts if shared else 0
        )

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of all choices together; None where the request does not say."""
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            value = self.table.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value * self.choices
        return None

    @property
    def choices(self) -> int:
        counts = [self.table.get(name) for name in ("n", "best_of")]
        return max([1, *(count for count in counts if isinstance(count, int) and 0 < count <= 1024)])

    @property
    def reports_usage(self) -> bool:
        """Whether its stream ends with the token counts."""
        options = self.table.get("stream_options")
        return isinstance(options, dict) and options.get("include_usage") is True

    @property
    def usage_is_hidden(self) -> bool:
        """Whether an event with the token counts is the gateway's own wish; other APIs always send it."""
        return self.path in _STREAM_OPTIONS and not self.reports_usage


def decode(data: bytes, path: str) -> RequestBody:
    try:
        table = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not JSON ({error}); correct it") from None
    if not isinstance(table, dict):
        raise bad_request('the body is not a JSON object; send {"model": …}')
    model = table.get("model")
    if not isinstance(model, str) or not model:
        raise bad_request('the body names no model; add "model", as GET /v1/models lists them', "model")
    return RequestBody(table, model, table.get("stream") is True, path)


def forwarded(
    body: RequestBody, *, model: str, max_tokens: int | None, usage: bool, key: ApiKey | None = None
) -> bytes:
    """The body for a replica: with its own name of the model, a max_tokens where one was reserved, a request for token
    counts at the end of a stream, and the salt and priority of its `key`. It is written anew even where nothing
    changes, so that the replica reads the same values that were checked here, also of a key that is there twice."""
    changes: dict[str, Any] = {}
    if model != body.model:
        changes["model"] = model
    if max_tokens is not None:
        changes[_MAX_TOKENS[body.path]] = max_tokens
    if usage and body.path in _STREAM_OPTIONS and not body.reports_usage:
        options = body.table.get("stream_options")
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if key is not None and body.path not in _NOT_SALTED:
        changes |= _of_key(key, body.table)
    return bytes(msgspec.json.encode({**body.table, **changes}))


def _of_key(key: ApiKey, table: dict[str, Any]) -> dict[str, Any]:
    """Fields of vLLM: requests with other salts never share a cached prefix, and a client may only lower its own
    priority."""
    wanted, given = table.get("cache_salt"), table.get("priority")
    salt = _salt(f"{key.id}:{wanted}") if wanted else _own_salt(key.id)
    priority = max(key.priority, given) if isinstance(given, int) else key.priority
    return {"cache_salt": salt} | ({"priority": priority} if priority else {"priority": None} if given else {})


def _salt(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


@lru_cache(1024)
def _own_salt(key: str) -> str:
    return _salt(f"{key}:")


def _text(value: Any) -> bytes:
    """Text of a prompt, a list of messages, or any other JSON."""
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, list):
        return _SEPARATOR.join(_text(item) for item in value)
    if isinstance(value, dict):
        content = value.get("content")
        if not isinstance(content, str | list):
            return bytes(msgspec.json.encode(value))
        rest = {name: item for name, item in value.items() if name not in ("role", "content")}  # calls of tools, …
        role = str(value.get("role", "")).encode("utf-8", "surrogatepass")
        return role + b":" + _text(content) + (bytes(msgspec.json.encode(rest)) if rest else b"")
    return str(value).encode()
