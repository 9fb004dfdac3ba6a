"""Body of OpenAI's POST /v1/responses, and the chat request that it stands for. Responses are not stored."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from armillary.serving.http.problem import bad_request
from armillary.serving.openai.schemas import (
    CalledFunction,
    ChatRequest,
    Function,
    JsonSchema,
    Message,
    Name,
    NamedFunction,
    OneOrMore,
    Probability,
    ResponseFormat,
    Tool,
    ToolCall,
    ToolChoice,
)


class ResponsesTool(Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    """what it does"""
    parameters: dict[str, Any] | None = None
    """JSON Schema of its arguments"""
    strict: bool | None = None
    """ignored: arguments of a required call always match"""


class ResponsesToolChoice(Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


class TextFormat(Struct, kw_only=True):
    """What the output must match."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    """not used"""
    schema: dict[str, Any] | None = None
    """for type json_schema"""
    strict: bool | None = None
    """always on"""


class TextOptions(Struct, kw_only=True):
    """Options of the text."""

    format: TextFormat | None = None
    """what the output must match"""


class ResponsesRequest(Struct, kw_only=True):
    """Body of /v1/responses."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=16_384)]
    """text, or items: messages, function_call and function_call_output"""
    model: Annotated[str, Meta(max_length=1024)] | None = None
    """one of /v1/models; left out: the served model"""
    instructions: str | None = None
    """system prompt"""
    max_output_tokens: OneOrMore | None = None
    """limit of generated tokens"""
    stream: bool | None = None
    """send the output as events while it is generated"""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy; left out: 1"""
    top_p: Probability | None = None
    """sample from the likeliest tokens whose probabilities sum to this"""
    tools: Annotated[list[ResponsesTool], Meta(max_length=512)] | None = None
    """functions that the model may call"""
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    """none, auto (the model decides), required (any call), or the function that must be called"""
    parallel_tool_calls: bool | None = None
    """false: the first call only"""
    text: TextOptions | None = None
    """options of the text"""
    previous_response_id: str | None = None
    """not supported: responses are not stored"""
    background: bool | None = None
    """not supported"""
    reasoning: dict[str, Any] | None = None
    """ignored: whether a model thinks is a matter of its chat template"""
    truncation: Literal["auto", "disabled"] | None = None
    """only disabled"""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """ours: only requests with the same salt share cached prefixes"""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """ours: smaller values are scheduled first"""


def chat_of_responses(body: ResponsesRequest) -> ChatRequest:
    """The chat request that a request for a response stands for."""
    if body.previous_response_id or body.background:
        name = "previous_response_id" if body.previous_response_id else "background"
        raise bad_request(f"{name} is not supported, as responses are not stored; send the conversation as input", name)
    if body.truncation == "auto":
        raise bad_request("truncation is not supported; shorten the input", "truncation")
    first = [Message(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*first, *_messages(body.input)],
        max_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        cache_salt=body.cache_salt,
        priority=body.priority,
        tools=[_tool(tool) for tool in body.tools] if body.tools else None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format) if body.text and body.text.format else None,
    )


def _tool(tool: ResponsesTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.parameters)
    return Tool(type="function", function=function)


def _choice(choice: Any) -> Any:
    if isinstance(choice, ResponsesToolChoice):
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    return choice


def _format(asked: TextFormat) -> ResponseFormat:
    schema = JsonSchema(schema=asked.schema) if asked.schema is not None else None
    return ResponseFormat(type=asked.type, json_schema=schema)


def _messages(items: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(Message(role=_string(item, "role", place), content=_text(item.get("content"), place)))
        elif kind == "function_call":
            _add_call(messages, item, place)
        elif kind == "function_call_output":
            result = _text(item.get("output"), place)
            messages.append(Message(role="tool", content=result, tool_call_id=_string(item, "call_id", place)))
        elif kind != "reasoning":
            raise bad_request(f"input[{place}] has the type {str(kind)[:60]!r}, which is not supported; leave it out")
    if not messages:
        raise bad_request("input has no message; add one", "input")
    return messages


def _add_call(messages: list[Message], item: dict[str, Any], place: int) -> None:
    """Calls in a row belong to one message of the assistant."""
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        raise bad_request(f"input[{place}].arguments is no text; correct it", "input")
    function = CalledFunction(name=_string(item, "name", place), arguments=arguments)
    call = ToolCall(function=function, id=_string(item, "call_id", place))
    if messages and messages[-1].role == "assistant":
        messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), call]
    else:
        messages.append(Message(role="assistant", content="", tool_calls=[call]))


def _text(content: Any, place: int) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise bad_request(f"input[{place}] has a part that is not text; this model reads text", "input")
    return "".join(part["text"] for part in parts)


def _string(item: dict[str, Any], name: str, place: int) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value or len(value) > 256:
        raise bad_request(f"input[{place}].{name} is missing or no short text; add it", "input")
    return value
