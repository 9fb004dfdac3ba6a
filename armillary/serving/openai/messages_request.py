"""Bodies of Anthropic's POST /v1/messages and its count_tokens, and the chat requests that they stand for."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from armillary.serving.http.problem import bad_request
from armillary.serving.openai.schemas import (
    CalledFunction,
    ChatRequest,
    Function,
    Message,
    Name,
    NamedFunction,
    OneOrMore,
    Probability,
    StopString,
    TokenizeRequest,
    Tool,
    ToolCall,
    ToolChoice,
)

Blocks = str | list[dict[str, Any]]


class AnthropicMessage(Struct, kw_only=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks
    """text, or blocks of type text, tool_use, tool_result and thinking"""


class AnthropicTool(Struct, kw_only=True):
    """A tool that the model may use."""

    name: Name
    input_schema: dict[str, Any]
    """JSON Schema of its input"""
    description: str | None = None
    type: Literal["custom"] | None = None


class AnthropicToolChoice(Struct, kw_only=True):
    """Whether tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    """for type tool"""
    disable_parallel_tool_use: bool | None = None
    """true: one call at most"""


class CountTokensRequest(Struct, kw_only=True):
    """Body of /v1/messages/count_tokens: what becomes the prompt of a message."""

    messages: Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=16_384)]
    """the conversation so far"""
    model: Annotated[str, Meta(max_length=1024)] | None = None
    """one of /v1/models; left out: the served model"""
    system: Blocks | None = None
    """system prompt"""
    tools: Annotated[list[AnthropicTool], Meta(max_length=512)] | None = None
    """tools that the model may use"""
    tool_choice: AnthropicToolChoice | None = None
    """auto, any (some call), tool (this call) or none"""
    thinking: dict[str, Any] | None = None
    """ignored: whether a model thinks is a matter of its chat template"""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of /v1/messages."""

    max_tokens: OneOrMore
    """limit of generated tokens"""
    stream: bool | None = None
    """send the output as events while it is generated"""
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    """texts that end the output and are not part of it"""
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """0 is greedy; left out: 1"""
    top_p: Probability | None = None
    """sample from the likeliest tokens whose probabilities sum to this"""
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    """sample from the k likeliest tokens"""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """ours: only requests with the same salt share cached prefixes"""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """ours: smaller values are scheduled first"""


def chat_of_messages(body: MessagesRequest) -> ChatRequest:
    """The chat request that a request for a message stands for."""
    choice = body.tool_choice
    return ChatRequest(
        model=body.model,
        messages=_chat_messages(body),
        max_tokens=body.max_tokens,
        stream=body.stream,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k or None,
        cache_salt=body.cache_salt,
        priority=body.priority,
        tools=_chat_tools(body),
        tool_choice=_choice(choice) if choice is not None else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
    )


def tokenize_of_messages(body: CountTokensRequest) -> TokenizeRequest:
    """The conversation whose tokens are the prompt of a message."""
    hidden = body.tool_choice is not None and body.tool_choice.type == "none"
    return TokenizeRequest(messages=_chat_messages(body), tools=None if hidden else _chat_tools(body))


def _chat_messages(body: CountTokensRequest) -> list[Message]:
    system = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    return [*system, *(each for place, message in enumerate(body.messages) for each in _messages(message, place))]


def _chat_tools(body: CountTokensRequest) -> list[Tool] | None:
    return [_tool(tool) for tool in body.tools] if body.tools else None


def _tool(tool: AnthropicTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(type="function", function=function)


def _choice(choice: AnthropicToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise bad_request("tool_choice of type tool names no tool; add name", "tool_choice.name")
        return ToolChoice(type="function", function=NamedFunction(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _messages(message: AnthropicMessage, place: int) -> Iterator[Message]:
    """A message; results of tools are messages of their own, before the text that follows them."""
    where = f"messages[{place}].content"
    if isinstance(message.content, str):
        yield Message(role=message.role, content=message.content)
        return
    blocks = [block for block in message.content if block.get("type") not in ("thinking", "redacted_thinking")]
    for block in blocks:
        if block.get("type") == "tool_result":
            content = _text(block.get("content") or "", where)
            yield Message(role="tool", content=content, tool_call_id=_string(block, "tool_use_id", where))
    texts = [block for block in blocks if block.get("type") not in ("tool_use", "tool_result")]
    calls = [_call(block, where) for block in blocks if block.get("type") == "tool_use"]
    if texts or calls or not blocks:
        yield Message(role=message.role, content=_text(texts, where), tool_calls=calls or None)


def _call(block: dict[str, Any], where: str) -> ToolCall:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise bad_request(f"{where} has a tool_use whose input is no object; correct it", where)
    function = CalledFunction(name=_string(block, "name", where), arguments=arguments)
    return ToolCall(function=function, id=_string(block, "id", where))


def _text(blocks: Any, where: str) -> str:
    if isinstance(blocks, str):
        return blocks
    if not isinstance(blocks, list):
        raise bad_request(f"{where} is neither text nor blocks; correct it", where)
    for block in blocks:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise bad_request(f"{where} has a block that is not text; this model reads text", where)
    return "".join(block["text"] for block in blocks)


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where} has a block without {name}; add it", where)
    return value
