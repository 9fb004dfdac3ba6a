"""Request bodies: OpenAI's fields, vLLM's, and a few of our own (their help begins with "ours").

msgspec decodes and validates bodies with these classes, and `openapi.py` derives the OpenAPI document from them.
Other fields are refused where they would constrain the output, and else ignored (`request_body.py`).
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from armillary.engine.request.sampling_params import MOST_LOGPROBS

MOST_CHOICES = 128
_MAX_INT = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MAX_INT)]
OneOrMore = Annotated[int, Meta(ge=1, le=_MAX_INT)]
TokenId = Annotated[int, Meta(ge=0, le=_MAX_INT)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Source = Annotated[str, Meta(min_length=1)]
"""text of a regular expression or grammar"""
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]


class StreamOptions(Struct, kw_only=True):
    """Options of a streamed response."""

    include_usage: bool | None = None
    """whether a last event has the usage"""
    continuous_usage_stats: bool | None = None
    """ours: whether every event has the usage"""


class JsonSchema(Struct, kw_only=True):
    """A named schema."""

    schema: dict[str, Any]
    """JSON Schema"""
    name: str | None = None
    """not used"""
    strict: bool | None = None
    """always on"""


class ResponseFormat(Struct, kw_only=True):
    """What the output must match."""

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
    """vLLM's: what the output must match; one of the first five fields."""

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
    """always on: JSON has no more white space than its separators"""
    disable_additional_properties: bool | None = None
    """not supported: set additionalProperties in the schema"""
    disable_fallback: bool | None = None
    """always on"""


class SamplingFields(Struct, kw_only=True):
    """Fields that chats and completions share."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """one of /v1/models; left out: the served model"""
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    """completions per prompt"""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy; left out: 1"""
    top_p: Probability | None = None
    """sample from the likeliest tokens whose probabilities sum to this"""
    presence_penalty: Penalty | None = None
    """subtracted from the logits of tokens that were generated"""
    frequency_penalty: Penalty | None = None
    """subtracted once per occurrence"""
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=4096)] | None = None
    """token id -> number added to its logit"""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """the same seed gives the same output"""
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    """stop strings: they end the output and are not part of it"""
    stream: bool | None = None
    """send the output as server-sent events while it is generated"""
    stream_options: StreamOptions | None = None
    """options of a streamed response"""
    response_format: ResponseFormat | None = None
    """what the output must match"""
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    """ours: sample from the k likeliest tokens"""
    min_p: Probability | None = None
    """ours: drop tokens below this fraction of the largest probability"""
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    """ours: divides the logits of tokens in prompt and output"""
    min_tokens: Count | None = None
    """ours: minimum of generated tokens"""
    ignore_eos: bool | None = None
    """ours: do not stop at the model's end tokens"""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    """ours: tokens that end the output"""
    timeout_s: Annotated[float, Meta(ge=0.001, le=86_400)] | None = None
    """ours: time limit in seconds"""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """ours: only requests with the same salt share cached prefixes"""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """ours: smaller values are scheduled first"""
    guided_json: dict[str, Any] | str | None = None
    """vLLM's: the output is JSON of this schema, an object or JSON text"""
    guided_regex: Source | None = None
    """vLLM's: the output matches this regular expression"""
    guided_choice: Choices | None = None
    """vLLM's: the output is one of these texts"""
    guided_grammar: Source | None = None
    """vLLM's: the output matches this grammar, in Lark's or llama.cpp's notation (GBNF)"""
    guided_decoding_backend: str | None = None
    """vLLM's: ignored, there is one backend"""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's newer form of the guided fields"""
    bad_words: Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)] | None = None
    """vLLM's: texts that are not generated, as tokenized at the beginning of a text and after a space"""
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=1_000_000)] | None = None
    """vLLM's: the only tokens that are generated, end tokens included"""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    """vLLM's: use only this many of the prompt's last tokens; -1: as many as leave room for max_tokens"""
    include_stop_str_in_output: bool | None = None
    """vLLM's: stop strings and stop tokens are part of the output"""
    skip_special_tokens: bool | None = None
    """vLLM's: false keeps special tokens in the text"""


class CompletionRequest(SamplingFields, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1)]
    """text or token ids, or a list of either"""
    max_tokens: Count | None = None
    """limit of generated tokens; left out: 16; 0: echo only"""
    echo: bool | None = None
    """the prompt comes before the completion"""
    logprobs: TopLogprobs | None = None
    """log-probabilities of the generated token and of this many likeliest tokens"""
    best_of: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    """at most n: selecting from more completions is not supported"""
    add_special_tokens: bool | None = None
    """vLLM's: add the tokenizer's special tokens; left out: true"""
    suffix: str | None = None
    """not supported"""
    return_tokens_as_token_ids: bool | None = None
    """ours: write tokens of logprobs as token_id:N"""


class Part(Struct, kw_only=True):
    """A part of a message."""

    type: str
    """text"""
    text: str | None = None


class CalledFunction(Struct, kw_only=True):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """as JSON text"""


class ToolCall(Struct, kw_only=True):
    """A tool call of the assistant."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    """system, user, assistant, tool …"""
    content: str | list[Part] | None = None
    """text, or parts of text"""
    name: str | None = None
    """name of the author"""
    tool_calls: list[ToolCall] | None = None
    """tool calls of the assistant"""
    tool_call_id: str | None = None
    """the tool call that this message is the result of"""
    reasoning_content: str | None = None
    """ours: the assistant's reasoning"""
    reasoning: str | None = None
    """ours: another name of reasoning_content"""


class Function(Struct, kw_only=True):
    """A function that may be called."""

    name: Name
    description: str | None = None
    """what it does"""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments"""
    strict: bool | None = None
    """ignored: arguments of a required call always match"""


class Tool(Struct, kw_only=True):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct, kw_only=True):
    """A function by its name."""

    name: Name


class ToolChoice(Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=16_384)]
    """the conversation so far"""
    max_tokens: OneOrMore | None = None
    """limit of generated tokens; left out: the rest of the context"""
    max_completion_tokens: OneOrMore | None = None
    """the newer name of max_tokens"""
    logprobs: bool | None = None
    """whether to return log-probabilities of the generated tokens"""
    top_logprobs: TopLogprobs | None = None
    """also return those of this many likeliest tokens"""
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    """none, auto (the model decides), required (any call), or the function that must be called"""
    parallel_tool_calls: bool | None = None
    """false: the first call only"""
    add_generation_prompt: bool | None = None
    """ours: false leaves out the generation prompt; so does continue_final_message"""
    continue_final_message: bool | None = None
    """vLLM's: the completion continues the last message"""
    chat_template: Annotated[str, Meta(min_length=1, max_length=1_000_000)] | None = None
    """vLLM's: a Jinja template instead of the model's; needs serve.trust_request_chat_template"""
    chat_template_kwargs: dict[str, Any] | None = None
    """ours: variables for the chat template"""


class LoadAdapterRequest(Struct, kw_only=True):
    """Body of /v1/load_lora_adapter, as vLLM's."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """a folder on the server's machine"""


class UnloadAdapterRequest(Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]


class TokenizeRequest(Struct, kw_only=True):
    """Body of /tokenize: a prompt, or a conversation."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=16_384)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=512)] | None = None
    add_special_tokens: bool | None = None
    """add the tokenizer's special tokens; left out: true"""
    add_generation_prompt: bool | None = None
    """false leaves out the generation prompt; so does continue_final_message"""
    continue_final_message: bool | None = None
    """the prompt ends with the last message, which stays open"""
    chat_template: Annotated[str, Meta(min_length=1, max_length=1_000_000)] | None = None
    """a Jinja template instead of the model's; needs serve.trust_request_chat_template"""
    chat_template_kwargs: dict[str, Any] | None = None
    """variables for the chat template"""
    return_token_strs: bool | None = None
    """also return the text of each token"""


class DetokenizeRequest(Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: Annotated[str, Meta(max_length=1024)] | None = None
