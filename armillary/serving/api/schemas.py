"""What requests may hold, as JSON Schema: OpenAI's fields, and a few of our own (`Ours:` in their description).

Bodies are checked against these (`check.py`) and the OpenAPI document is made of them (`openapi.py`). Fields that are
not named here are let pass, as clients send more than servers know.
"""

from __future__ import annotations

from typing import Any

from armillary.serving.engine.params import MOST_LOGPROBS

Schema = dict[str, Any]

MOST_CHOICES = 128
_MOST_ID = 2**31 - 1


def _field(kinds: str | list[str], about: str, **more: Any) -> Schema:
    return {"type": kinds, "description": about, **more}


def _maybe(kind: str, about: str, **more: Any) -> Schema:
    """A field that may be null, which is as if it were left out."""
    return _field([kind, "null"], about, **more)


def _one_of(*options: Schema, about: str) -> Schema:
    return {"anyOf": list(options), "description": about}


_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string"}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": _MOST_ID}, "minItems": 1}

_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _NAME, "description": _maybe("string", "what it does"),
                   "parameters": _maybe("object", "JSON Schema of its arguments"),
                   "strict": _maybe("boolean", "arguments always match where the call is forced")},
}  # fmt: skip
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"type": "string", "enum": ["function"]}, "function": _FUNCTION},
}
_TOOL_CHOICE: Schema = _one_of(
    _NULL,
    {"type": "string", "enum": ["none", "auto", "required"]},
    {"type": "object", "required": ["type", "function"],
     "properties": {"type": {"type": "string", "enum": ["function"]},
                    "function": {"type": "object", "required": ["name"], "properties": {"name": _NAME}}}},
    about="none, auto (the model decides), required (some call), or the function that has to be called",
)  # fmt: skip
_FORMATS = ("text", "json_object", "json_schema", "regex", "choice", "grammar")
_FORMAT: Schema = _one_of(
    _NULL,
    {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"type": "string", "enum": list(_FORMATS)},
            "json_schema": {"type": "object", "required": ["schema"],
                            "properties": {"name": _TEXT, "schema": {"type": "object"},
                                           "strict": _maybe("boolean", "always so")}},
            "regex": _field("string", "Ours: for type regex", minLength=1),
            "choice": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1024,
                       "description": "Ours: for type choice, the texts to choose from"},
            "grammar": _field("string", "Ours: for type grammar, in Lark's notation", minLength=1),
        },
    },
    about="what the answer must match",
)  # fmt: skip

_DRAWING: dict[str, Schema] = {
    "model": _maybe("string", "one of /v1/models; left out: the one there is", maxLength=1024),
    "n": _maybe("integer", "answers to the same prompt", minimum=1, maximum=MOST_CHOICES),
    "temperature": _maybe("number", "0 is greedy", minimum=0, maximum=100),
    "top_p": _maybe("number", "keep the likeliest tokens whose probabilities reach it", minimum=0, maximum=1),
    "presence_penalty": _maybe("number", "taken off tokens that came", minimum=-2, maximum=2),
    "frequency_penalty": _maybe("number", "taken off for each time they came", minimum=-2, maximum=2),
    "logit_bias": _maybe("object", "token id -> what is added to its logit", maxProperties=4096,
                         additionalProperties={"type": "number", "minimum": -100, "maximum": 100}),
    "seed": _maybe("integer", "same seed, same answer", minimum=-(2**63), maximum=2**63 - 1),
    "stop": _one_of(_NULL, {"type": "string", "minLength": 1, "maxLength": 1024},
                    {"type": "array", "maxItems": 16, "items": {"type": "string", "minLength": 1, "maxLength": 1024}},
                    about="texts that end the answer and are not part of it"),
    "stream": _maybe("boolean", "pieces as they come, as server-sent events"),
    "stream_options": _one_of(
        _NULL,
        {"type": "object", "properties": {
            "include_usage": _maybe("boolean", "a last event says how many tokens it was"),
            "continuous_usage_stats": _maybe("boolean", "Ours: every event says so")}},
        about="how streams are sent"),
    "user": _maybe("string", "who asks; not used"),
    "top_k": _maybe("integer", "Ours: keep the k likeliest", minimum=-1, maximum=_MOST_ID),
    "min_p": _maybe("number", "Ours: drop what is less likely than this share of the likeliest", minimum=0, maximum=1),
    "repetition_penalty": _maybe("number", "Ours: divides logits of tokens that occurred", minimum=0.01, maximum=100),
    "min_tokens": _maybe("integer", "Ours: no end before so many tokens", minimum=0, maximum=_MOST_ID),
    "ignore_eos": _maybe("boolean", "Ours: the model's end tokens do not end the answer"),
    "stop_token_ids": _maybe("array", "Ours: tokens that end the answer", maxItems=256,
                             items={"type": "integer", "minimum": 0, "maximum": _MOST_ID}),
    "timeout_s": _maybe("number", "Ours: give up after so many seconds", minimum=0.001, maximum=86_400),
    "cache_salt": _maybe("string", "Ours: only requests with the same share cached prompts", maxLength=256),
    "priority": _maybe("integer", "Ours: smaller goes first", minimum=-1000, maximum=1000),
}  # fmt: skip
_TOKENS_OUT = "tokens of an answer at most"

COMPLETION: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": _one_of(
            {"type": "string"}, IDS,
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 1024},
            {"type": "array", "items": IDS, "minItems": 1, "maxItems": 1024},
            about="text or token ids, or a list of either"),
        "max_tokens": _maybe("integer", f"{_TOKENS_OUT}; 16 where nothing is said; 0 with echo", minimum=0,
                             maximum=_MOST_ID),
        "echo": _maybe("boolean", "the prompt comes before the answer"),
        "logprobs": _maybe("integer", "log probabilities of the chosen and so many likeliest tokens", minimum=0,
                           maximum=MOST_LOGPROBS),
        "best_of": _maybe("integer", "as n; more are not drawn to choose from", minimum=1, maximum=MOST_CHOICES),
        "suffix": _maybe("string", "not supported"),
        "response_format": _FORMAT,
        "return_tokens_as_token_ids": _maybe("boolean", "Ours: tokens of logprobs are written token_id:N"),
        **_DRAWING,
    },
}  # fmt: skip

_PART: Schema = {"type": "object", "required": ["type"],
                 "properties": {"type": {"type": "string"}, "text": {"type": "string"}}}  # fmt: skip
_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {"id": {"type": "string"}, "type": {"type": "string", "enum": ["function"]},
                   "function": {"type": "object", "required": ["name"],
                                "properties": {"name": _TEXT, "arguments": {"type": ["string", "object"]}}}},
}  # fmt: skip
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": _field("string", "system, user, assistant, tool …", minLength=1, maxLength=64),
        "content": _one_of(_NULL, _TEXT, {"type": "array", "items": _PART}, about="text, or parts of text"),
        "name": _maybe("string", "who wrote it"),
        "tool_calls": _maybe("array", "what the assistant called", items=_CALL),
        "tool_call_id": _maybe("string", "the call that this answers"),
    },
}
CHAT: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 16_384},
        "max_tokens": _maybe("integer", f"{_TOKENS_OUT}; nothing said: what the model's length leaves", minimum=1,
                             maximum=_MOST_ID),
        "max_completion_tokens": _maybe("integer", "the newer name of max_tokens", minimum=1, maximum=_MOST_ID),
        "logprobs": _maybe("boolean", "log probabilities of the answer's tokens"),
        "top_logprobs": _maybe("integer", "and of so many likeliest", minimum=0, maximum=MOST_LOGPROBS),
        "tools": _maybe("array", "functions that the model may call", items=_TOOL, maxItems=512),
        "tool_choice": _TOOL_CHOICE,
        "parallel_tool_calls": _maybe("boolean", "false: the first call only"),
        "response_format": _FORMAT,
        "chat_template_kwargs": _maybe("object", "Ours: variables for the chat template"),
        "add_generation_prompt": _maybe("boolean", "Ours: false leaves the assistant's opening out"),
        **_DRAWING,
    },
}  # fmt: skip

TOKENIZE: Schema = {
    "type": "object",
    "properties": {
        "model": _DRAWING["model"],
        "prompt": _field("string", "text"),
        "messages": CHAT["properties"]["messages"],
        "tools": CHAT["properties"]["tools"],
        "add_special_tokens": _maybe("boolean", "what the tokenizer puts around a text; true for a prompt"),
        "add_generation_prompt": CHAT["properties"]["add_generation_prompt"],
        "chat_template_kwargs": CHAT["properties"]["chat_template_kwargs"],
        "return_token_strs": _maybe("boolean", "the text of each token too"),
    },
}
DETOKENIZE: Schema = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"model": _DRAWING["model"], "tokens": {**IDS, "minItems": 0}},
}
