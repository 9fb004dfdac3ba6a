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
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
"""paths whose responses have tokens, and the fields that bound them there; the others mean nothing to a server"""
_BOUNDS = {name for names in _MAX_TOKENS.values() for name in names}
_CHOICES = ("n", "best_of")
_MOST = 2**31
_MESSAGE_TOKENS = 16
"""most tokens that chat templates add around each message"""
_RANKED, _JUDGE_BYTES = ("/v1/rerank", "/v1/score"), 512
"""paths that compare texts, and the bytes around each pair where a model judges it"""
_NO_PROMPT = ("model", "user", "cache_salt", "stop", "stream_options")
"""fields that never become part of a prompt; all others may, as tools, schemas and documents do"""
_TEXTS = (str, list, dict)
_STREAM_OPTIONS = ("/v1/chat/completions", "/v1/completions")
_WITHOUT_MODEL = ("/tokenize", "/detokenize", "/v1/messages/count_tokens")
"""paths that only need a tokenizer: they cost no tokens, and leave nothing in a prefix cache"""


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

    @property
    def uses_model(self) -> bool:
        """Whether the model itself runs, so that tokens count."""
        return self.path not in _WITHOUT_MODEL

    @cached_property
    def prompt(self) -> bytes:
        """The text of the prompt, to compare beginnings and to bound its tokens."""
        parts = [
            _text(self.table.get(name))
            for name in ("instructions", "system", "tools", "messages", "prompt", "input", "query", "text_1")
        ]
        return _SEPARATOR.join(part for part in parts if part)

    def most_prompt_tokens(self, bytes_per_token: float, template_tokens: int) -> int:
        """An upper bound of the prompt's tokens: bytes of its text, and what a chat template adds: a default system
        prompt of `template_tokens`, and marks around each message."""
        messages = self.table.get("messages")
        count = len(messages) if isinstance(messages, list) else 0
        texts = (each for name, each in self.table.items() if name not in _NO_PROMPT and isinstance(each, _TEXTS))
        size = sum(len(_text(each)) for each in texts)
        size += self._repeated_bytes()
        return int(size / bytes_per_token) + template_tokens * self._texts + _MESSAGE_TOKENS * count

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
        """Most tokens of a choice; None where the request does not say so in a field of its path."""
        given = [self.table.get(name) for name in _MAX_TOKENS.get(self.path, ())]
        return max((value for value in given if value is not None and value >= 0), default=None)

    @property
    def choices(self) -> int:
        """Texts that are generated: `n` or `best_of` for each prompt."""
        counts = [self.table.get(name) or 1 for name in _CHOICES]
        return max(1, *counts) * self._prompts

    @property
    def _prompts(self) -> int:
        """Of a completion, which may have a list of them; a list of numbers is one."""
        prompt = self.table.get("prompt")
        is_list = isinstance(prompt, list) and any(isinstance(each, str | list) for each in prompt)
        return len(prompt) if is_list and prompt is not None else 1

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
    for name in (*_BOUNDS, *_CHOICES):
        if table.get(name) is not None and not _is_count(table[name]):  # a server might take "9" for 9
            raise bad_request(f"{name} is no whole number, or too large; correct it", name)
    return RequestBody(table, model, table.get("stream") is True, path)


def _is_count(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def forwarded(
    body: RequestBody, *, model: str, max_tokens: int | None, usage: bool, key: ApiKey | None = None
) -> bytes:
    """The body for a replica: with its own name of the model, the `max_tokens` that were reserved for each choice and
    no other bound, a request for token counts at the end of a stream, and the salt and priority of its `key`. It is
    written anew even where nothing changes, so that the replica reads the same values that were checked here, also of
    a key that is there twice."""
    table, changes = body.table, dict[str, Any]()
    if model != body.model:
        changes["model"] = model
    if max_tokens is not None:
        table = _bounded(body, max_tokens)
    if usage and body.path in _STREAM_OPTIONS and not body.reports_usage:
        options = body.table.get("stream_options")
        changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    if key is not None and body.uses_model:
        changes |= _of_key(key, body.table)
    return bytes(msgspec.json.encode({**table, **changes}))


def _bounded(body: RequestBody, max_tokens: int) -> dict[str, Any]:
    """The fields with one bound of the tokens, under the name that the request uses."""
    names = _MAX_TOKENS[body.path]
    name = next((each for each in names if body.table.get(each) is not None), names[0])
    return {key: value for key, value in body.table.items() if key not in _BOUNDS} | {name: max_tokens}


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
