"""POST /v1/chat/completions: conversations through the model's chat template, with tools and structured outputs."""

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from msgspec import to_builtins

from armillary.serving.http.problem import bad_request
from armillary.serving.openai.generation import ChoiceDelta, Generation
from armillary.serving.openai.generation_request import generation_request, max_new_tokens, truncate_prompt
from armillary.serving.openai.logprobs import TokenText, chat_entry
from armillary.serving.openai.reasoning import REASONING_TOKENS, ReasoningStream, reasoning_stream
from armillary.serving.openai.schemas import ChatRequest, Message, TokenizeRequest, Tool, ToolCall, ToolChoice
from armillary.serving.openai.served_model import ServedModel
from armillary.serving.openai.structured_outputs import json_structure, refuse_structure_with_calls, structure_of
from armillary.serving.openai.tool_calls import (
    ForcedCalls,
    ToolCallText,
    ToolStream,
    forced_schema,
    parse_json,
    special_tokens,
    tool_stream,
)

_PROMPT_END = 8
"""last tokens of a prompt, in which a template may open the reasoning"""
_FIXED = frozenset({"messages", "tools", "add_generation_prompt", "marks", "continue_final", "template"})


class _ChatChoice:
    """One choice so far."""

    def __init__(self, tools: ToolStream | None, reasoning: ReasoningStream | None = None) -> None:
        self.tools = tools
        self.reasoning = reasoning
        self.reasoning_text = ""
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None


class ChatFormatter:
    """Formats the choices of a chat completion."""

    def __init__(self, choices: list[_ChatChoice], body: ChatRequest, token_text: TokenText, *, by_name: bool) -> None:
        """`by_name`: the request names the function to call."""
        self._choices = choices
        self._token_text = token_text
        self._has_logprobs = bool(body.logprobs)
        self._single_call = body.parallel_tool_calls is False
        self._finish_of_calls = "stop" if by_name else "tool_calls"

    def first_choices(self) -> Iterable[dict[str, Any]]:
        return [_event(i, {"role": "assistant", "content": ""}) for i in range(len(self._choices))]

    def add(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        choice = self._choices[delta.choice]
        reasoning, text, calls = self._split(choice, delta)
        choice.reasoning_text += reasoning
        logprobs = [chat_entry(logprob, self._token_text) for logprob in delta.logprobs] if self._has_logprobs else []
        choice.text += text
        choice.logprobs += logprobs
        added = self._add(choice, calls)
        if delta.finish is not None:
            # calls that max_tokens truncates must not be carried out: their finish_reason is "length", as without tools
            choice.finish = self._finish_of_calls if choice.calls and delta.finish == "stop" else delta.finish
        fields: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        fields |= {"content": text} if text else {}
        if added:
            fields["tool_calls"] = added
        if not (fields or logprobs or delta.finish):
            return []
        return [_event(delta.choice, fields, logprobs, choice.finish)]

    def _split(self, choice: _ChatChoice, delta: ChoiceDelta) -> tuple[str, str, list[ToolCallText]]:
        """(reasoning, text, calls) that are certain now."""
        reasoning, text, calls = "", delta.text, list[ToolCallText]()
        if choice.reasoning is not None:
            parts = [choice.reasoning.push(text), *([choice.reasoning.finish()] if delta.finish is not None else [])]
            reasoning, text = "".join(part.reasoning for part in parts), "".join(part.text for part in parts)
            calls = [call for part in parts for call in part.calls]
        if choice.tools is not None:
            text, more = choice.tools.push(text)
            calls += more
            if delta.finish is not None:
                rest, more = choice.tools.finish()
                text, calls = text + rest, calls + more
        if (calls or choice.calls) and not text.strip():
            text = ""  # line ends around calls
        return reasoning, text, calls

    def _add(self, choice: _ChatChoice, calls: list[ToolCallText]) -> list[dict[str, Any]]:
        """New calls as events carry them: with their index."""
        added = []
        for call in calls:
            if self._single_call and choice.calls:
                break
            entry = {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            added.append({"index": len(choice.calls), **entry})
            choice.calls.append(entry)
        return added

    def finish_reason(self, choice: int) -> str:
        return self._choices[choice].finish or "stop"

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "message": _message(choice),
                "finish_reason": choice.finish,
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._has_logprobs else None,
            }
            for i, choice in enumerate(self._choices)
        ]


def _message(choice: _ChatChoice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning_text:
        message["reasoning_content"] = choice.reasoning_text
    if choice.calls:
        message |= {"content": choice.text.strip() or None, "tool_calls": choice.calls}
    return message


def _event(
    index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
) -> dict[str, Any]:
    table = {"content": logprobs, "refusal": None} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": table, "finish_reason": finish}


async def chat(served: ServedModel, body: ChatRequest, begin: float) -> tuple[Generation, ChatFormatter]:
    """The generation that a validated body asks for, and the formatter of its choices."""
    _check_fields(body)
    tools, tool_choice, name = _tools(body)
    prompt = await chat_prompt(served, body, body.messages, None if tool_choice == "none" else tools)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = truncate_prompt(prompt, body.truncate_prompt_tokens, wanted, served)
    max_tokens = max_new_tokens(len(prompt), wanted, served, "messages")
    structure = structure_of(body)
    if tool_choice == "required":
        refuse_structure_with_calls(body)
        single = body.parallel_tool_calls is False
        structure = json_structure(forced_schema(tools, name, single=single), "tools")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = generation_request(
        body,
        max_tokens=max_tokens,
        max_timeout_s=served.serve.timeout_s,
        structure=structure,
        logprobs=logprobs,
        defaults=served.defaults,
        bad_tokens=served.tokenization.bad_tokens(body.bad_words),
    )
    is_json = structure is not None and structure.kind == "json_schema"
    family = served.tools if tools and tool_choice == "auto" and not is_json else None
    thinks = served.reasoning if structure is None else None
    visible = special_tokens(family) if family else frozenset[str]()
    visible |= REASONING_TOKENS[thinks] if thinks else frozenset()
    generation = Generation(served, [prompt], request, begin, visible)
    names = [tool.function.name for tool in tools]
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    prompt_end = served.tokenization.decode(prompt[-_PROMPT_END:]) if thinks == "think" else ""

    def stream() -> ToolStream | None:
        if tool_choice == "required":
            return ForcedCalls(name, names)
        return tool_stream(family, names, schemas) if family else None

    def reasoning() -> ReasoningStream | None:
        return reasoning_stream(thinks, prompt_end, names) if thinks else None

    choices = [_ChatChoice(stream(), reasoning()) for _ in generation.texts]
    return generation, ChatFormatter(choices, body, served.tokenization.token_text, by_name=name is not None)


def _check_fields(body: ChatRequest) -> None:
    """Problem 400 where one field needs or contradicts another."""
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs is given without logprobs; add logprobs: true", "top_logprobs")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")


def _tools(body: ChatRequest) -> tuple[list[Tool], str, str | None]:
    """(tools, none | auto | required, name of the function that must be called)."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad_request("tool_choice requires a call and there are no tools; add them", "tool_choice")
        return [], "none", None
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if all(tool.function.name != name for tool in tools):
            raise bad_request(f"tool_choice names '{name}', which is not among the tools; correct it", "tool_choice")
        return tools, "required", name
    return tools, choice or "auto", None


async def chat_prompt(
    served: ServedModel,
    body: ChatRequest | TokenizeRequest,
    messages: list[Message],
    tools: list[Tool] | None,
    *,
    tokenize_only: bool = False,
) -> list[int]:
    """Token ids of a conversation; `tokenize_only`: no completion waits for them."""
    variables = body.chat_template_kwargs or {}
    if not _FIXED.isdisjoint(variables):
        raise bad_request(
            "chat_template_kwargs names a field of the request itself; leave it out", "chat_template_kwargs"
        )
    trusts = served.serve.trust_request_chat_template
    if "chat_template" in variables or (body.chat_template is not None and not trusts):
        raise bad_request(
            "this server does not trust the chat_template of a request; leave it out, or start the server with --set "
            "serve.trust_request_chat_template=true and send it as a field",
            "chat_template",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
            "continue_final_message",
        )
    add_generation_prompt = body.add_generation_prompt is not False and not continues
    truncates = isinstance(body, ChatRequest) and body.truncate_prompt_tokens is not None
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    if not served.tokenization.knows_developer:
        plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
    ids = await served.tokenization.chat(
        plain,
        served.serve.max_body_bytes if truncates else served.max_model_len,
        tools=[_without_none(to_builtins(tool)) for tool in tools] if tools else None,
        add_generation_prompt=add_generation_prompt,
        continue_final=continues,
        template=body.chat_template,
        variables=variables,
        tokenize_only=tokenize_only,
    )
    if not ids:
        raise bad_request("the chat template turns these messages into no token; check them", "messages")
    return ids


def _without_none(value: Any) -> Any:
    """Without the fields that the request left out, as templates test whether a field is defined."""
    if not isinstance(value, dict):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as chat templates expect it: content as text, arguments as objects."""
    fields: dict[str, Any] = _without_none(to_builtins(message))
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad_request(
                    f"messages[{place}] has a part of type {part.type!r}; this model reads text",
                    f"messages[{place}].content",
                )
        content = "".join(part.text or "" for part in content)
    fields["content"] = content or ""
    if message.tool_calls:
        fields["tool_calls"] = [_call(call) for call in message.tool_calls]
    return fields


def _call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) or arguments is None:
        parsed = parse_json(arguments or "{}")
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
