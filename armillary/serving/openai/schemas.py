"""What requests may hold: OpenAI's fields, and a few of our own (their help begins with "ours").

msgspec reads bodies into these classes, checks them on the way, and makes the OpenAPI document of them (`openapi.py`).
Fields that are not named here are refused where they would hold an answer to something, and else let pass
(`unknown_fields.py`), as clients send more than servers know.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from armillary.engine.request.sampling_params import MOST_LOGPROBS
from armillary.serving.http.problem import Problem, bad

MOST_CHOICES = 128
_MOST = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MOST)]
OneOrMore = Annotated[int, Meta(ge=1, le=_MOST)]
TokenId = Annotated[int, Meta(ge=0, le=_MOST)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Source = Annotated[str, Meta(min_length=1)]
"""of a regular expression or grammar"""
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
Likeliest = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]


class StreamOptions(Struct, kw_only=True):
    """How streams are sent."""

    include_usage: bool | None = None
    """a last event says how many tokens it was"""
    continuous_usage_stats: bool | None = None
    """ours: every event says so"""


class JsonSchema(Struct, kw_only=True):
    """A named schema."""

    schema: dict[str, Any]
    """JSON Schema"""
    name: str | None = None
    """not used"""
    strict: bool | None = None
    """always so"""


class ResponseFormat(Struct, kw_only=True):
    """What the answer must match."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]
    """any text, any JSON object, JSON of a schema; ours: a regular expression, one of several texts, a Lark grammar"""
    json_schema: JsonSchema | None = None
    """for type json_schema"""
    regex: Source | None = None
    """ours: for type regex"""
    choice: Choices | None = None
    """ours: for type choice"""
    grammar: Source | None = None
    """ours: for type grammar"""


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's: what the answer must match; one of the first five."""

    json: dict[str, Any] | str | None = None
    """JSON Schema, or its text"""
    json_object: bool | None = None
    """any JSON object"""
    regex: Source | None = None
    """a regular expression"""
    choice: Choices | None = None
    """one of several texts"""
    grammar: Source | None = None
    """a grammar in Lark's or llama.cpp's notation (GBNF)"""
    structural_tag: str | dict[str, Any] | None = None
    """not supported"""
    whitespace_pattern: str | None = None
    """not supported"""
    disable_any_whitespace: bool | None = None
    """always so: JSON comes without more white space than its separators have"""
    disable_additional_properties: bool | None = None
    """not supported: say so in the schema"""
    disable_fallback: bool | None = None
    """always so"""


class Asked(Struct, kw_only=True):
    """What chats and completions share."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """one of /v1/models; left out: the one there is"""
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    """answers to the same prompt"""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy; left out: 1"""
    top_p: Share | None = None
    """keep the likeliest tokens whose probabilities reach it"""
    presence_penalty: Penalty | None = None
    """taken off the logits of tokens that came"""
    frequency_penalty: Penalty | None = None
    """taken off once for each time they came"""
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    """token id -> what is added to its logit"""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """same seed, same answer"""
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    """texts that end the answer and are not part of it"""
    stream: bool | None = None
    """pieces as they come, as server-sent events"""
    stream_options: StreamOptions | None = None
    """how streams are sent"""
    response_format: ResponseFormat | None = None
    """what the answer must match"""
    top_k: Annotated[int, Meta(ge=-1, le=_MOST)] | None = None
    """ours: keep the k likeliest"""
    min_p: Share | None = None
    """ours: drop what is less likely than this share of the likeliest"""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """ours: divides logits of tokens that occurred"""
    min_tokens: Count | None = None
    """ours: no end before so many tokens"""
    ignore_eos: bool | None = None
    """ours: the model's end tokens do not end the answer"""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    """ours: tokens that end the answer"""
    timeout_s: Annotated[float, Meta(ge=0.001, le=86_400)] | None = None
    """ours: give up after so many seconds"""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """ours: only requests with the same share cached prompts"""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """ours: smaller goes first"""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's: the answer is JSON of this schema, which may come as text"""
    guided_regex: Source | None = None
    """vLLM's: the answer matches this regular expression"""
    guided_choice: Choices | None = None
    """vLLM's: the answer is one of these texts"""
    guided_grammar: Source | None = None
    """vLLM's: the answer is of this grammar, in Lark's or llama.cpp's notation (GBNF)"""
    guided_decoding_backend: str | None = None
    """vLLM's: not used, there is one"""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer way to say the same"""
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)] | None = None
    """vLLM's: texts that do not come, as the tokenizer writes them at the beginning of a text and after a space"""
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=1_000_000)] | None = None
    """vLLM's: no other tokens come, end tokens included"""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MOST)] | None = None
    """vLLM's: only so many of the prompt's last tokens are used; -1: as many as leave room for max_tokens"""
    include_stop_str_in_output: bool | None = None
    """vLLM's: what ends the answer (stop, stop_token_ids) is part of it"""
    skip_special_tokens: bool | None = None
    """vLLM's: false shows the text of special tokens"""


class Completion(Asked, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    """text or token ids, or a list of either"""
    max_tokens: Count | None = None
    """tokens of an answer at most; left out: 16; 0 with echo"""
    echo: bool | None = None
    """the prompt comes before the answer"""
    logprobs: Likeliest | None = None
    """log probabilities of the chosen and so many likeliest tokens"""
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    """as n: more are not drawn to choose from"""
    add_special_tokens: bool | None = None
    """vLLM's: what the tokenizer puts around a text; left out: true"""
    suffix: str | None = None
    """not supported"""
    return_tokens_as_token_ids: bool | None = None
    """ours: tokens of logprobs are written token_id:N"""


class Part(Struct, kw_only=True):
    """A part of a message."""

    type: str
    """text"""
    text: str | None = None


class CalledFunction(Struct, kw_only=True):
    """What was called."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """as JSON text"""


class ToolCall(Struct, kw_only=True):
    """A call that the assistant made."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True, omit_defaults=True):
    """One turn of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    """system, user, assistant, tool …"""
    content: str | list[Part] | None = None
    """text, or parts of text"""
    name: str | None = None
    """who wrote it"""
    tool_calls: list[ToolCall] | None = None
    """what the assistant called"""
    tool_call_id: str | None = None
    """the call that this answers"""
    reasoning_content: str | None = None
    """ours: what the assistant thought"""
    reasoning: str | None = None
    """ours: the same, by another name"""


class Function(Struct, kw_only=True):
    """A function that may be called."""

    name: Name
    description: str | None = None
    """what it does"""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments"""
    strict: bool | None = None
    """arguments match anyway where a call is asked for"""


class Tool(Struct, kw_only=True):
    """Something the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct, kw_only=True):
    """A function by its name."""

    name: Name


class ToolChoice(Struct, kw_only=True):
    """The function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class Chat(Asked, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=16_384)]
    """the conversation so far"""
    max_tokens: OneOrMore | None = None
    """tokens of an answer at most; left out: what the model's length leaves"""
    max_completion_tokens: OneOrMore | None = None
    """the newer name of max_tokens"""
    logprobs: bool | None = None
    """log probabilities of the answer's tokens"""
    top_logprobs: Likeliest | None = None
    """and of so many likeliest"""
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """none, auto (the model decides), required (some call), or the function that has to be called"""
    parallel_tool_calls: bool | None = None
    """false: the first call only"""
    add_generation_prompt: bool | None = None
    """ours: false leaves the assistant's opening out; so does continue_final_message"""
    continue_final_message: bool | None = None
    """vLLM's: the last message is left open and the answer goes on with it"""
    chat_template: Annotated[str, Meta(min_length=1, max_length=1_000_000)] | None = None
    """vLLM's: a Jinja template in place of the model's; where serve.trust_request_chat_template is on"""
    chat_template_kwargs: dict[str, Any] | None = None
    """ours: variables for the chat template"""


class Tokenize(Struct, kw_only=True):
    """Body of /tokenize: a prompt, or a conversation."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=16_384)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    add_special_tokens: bool | None = None
    """what the tokenizer puts around a text; left out: true"""
    add_generation_prompt: bool | None = None
    """false leaves the assistant's opening out; so does continue_final_message"""
    continue_final_message: bool | None = None
    """the last message is left open"""
    chat_template: Annotated[str, Meta(min_length=1, max_length=1_000_000)] | None = None
    """a Jinja template in place of the model's; where serve.trust_request_chat_template is on"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the chat template"""
    return_token_strs: bool | None = None
    """the text of each token too"""


class Detokenize(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=1024)] | None = None


T = TypeVar("T")
_PLACE = re.compile(r" - at `(?:key in )?\$\.?(.*?)`$")
_MISSING = re.compile(r"Object missing required field `(.*?)`")


@lru_cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def read(body: bytes, kind: type[T]) -> T:
    """Problem 400 where `body` is not JSON of that kind."""
    try:
        found: T = _decoder(cast(Hashable, kind)).decode(body)
        return found
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from None
    except msgspec.DecodeError as error:
        raise bad(f"the body is not JSON ({error}); correct it") from None
    except UnicodeDecodeError:
        raise bad("the body is not JSON (not UTF-8); correct it") from None
    except RecursionError:
        raise bad("the body is not JSON that can be read (nested too deeply); flatten it") from None


def _wrong(text: str) -> Problem:
    """msgspec's message, with the field first."""
    place = _PLACE.search(text)
    param = place.group(1) if place else ""
    said = text[: place.start()] if place else text
    lacking = _MISSING.match(said)
    if lacking:
        where = f"{param}.{lacking.group(1)}" if param else lacking.group(1)
        return bad(f"{where} is missing; add it to the request", where)
    said = said[:1].lower() + said[1:]
    return bad(f"{param or 'the body'}: {said}; correct the request", param or None)
