"""POST /v1/chat/completions: a conversation through the model's template, with tools and structures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from uuid import uuid4

from msgspec import to_builtins

from armillary.serving.http.problem import bad
from armillary.serving.openai.generation import Answering, Piece
from armillary.serving.openai.logprobs import chat_entry
from armillary.serving.openai.sampling_request import answer_room, truncated, wish_of
from armillary.serving.openai.schemas import Chat, Message, Tokenize, Tool, ToolCall, ToolChoice
from armillary.serving.openai.served_model import Served
from armillary.serving.openai.structured_outputs import json_structure, refuse_beside_calls, structure_of
from armillary.serving.openai.tokenization import Texts
from armillary.serving.openai.tool_calls import Call, Forced, ToolStream, forced_schema, special_tokens, tool_stream

_FIXED = frozenset({"messages", "tools", "add_generation_prompt", "marks", "continue_final", "template"})


class _Choice:
    """One answer of a chat so far."""

    def __init__(self, tools: ToolStream | None) -> None:
        self.tools = tools
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.finish: str | None = None


class ChatForm:
    """Choices of a chat."""

    def __init__(self, choices: list[_Choice], body: Chat, texts: Texts, *, named: bool) -> None:
        self._choices = choices
        self._text_of = texts.token_text
        self._wants = bool(body.logprobs)
        self._one = body.parallel_tool_calls is False
        self._finish_of_calls = "stop" if named else "tool_calls"

    def open(self) -> Iterable[dict[str, Any]]:
        opening = {"role": "assistant", "content": ""}
        return [_delta(i, opening) for i in range(len(self._choices))]

    def grow(self, piece: Piece) -> list[dict[str, Any]]:
        choice = self._choices[piece.choice]
        text, calls = self._split(choice, piece)
        logprobs = [chat_entry(found, self._text_of) for found in piece.logprobs] if self._wants else []
        choice.text += text
        choice.logprobs += logprobs
        added = self._add(choice, calls)
        if piece.finish is not None:
            # calls that max_tokens cut short are no calls to carry out: that says "length", as without tools
            choice.finish = self._finish_of_calls if choice.calls and piece.finish == "stop" else piece.finish
        delta: dict[str, Any] = {"content": text} if text else {}
        if added:
            delta["tool_calls"] = added
        if not (delta or logprobs or piece.finish):
            return []
        return [_delta(piece.choice, delta, logprobs, choice.finish)]

    def _split(self, choice: _Choice, piece: Piece) -> tuple[str, list[Call]]:
        if choice.tools is None:
            return piece.text, []
        text, calls = choice.tools.push(piece.text)
        if piece.finish is not None:
            rest, more = choice.tools.finish()
            text, calls = text + rest, calls + more
        if (calls or choice.calls) and not text.strip():
            text = ""  # line ends around calls
        return text, calls

    def _add(self, choice: _Choice, calls: list[Call]) -> list[dict[str, Any]]:
        """New calls as events carry them: with their place."""
        added = []
        for call in calls:
            if self._one and choice.calls:
                break
            made = {
                "id": f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            added.append({"index": len(choice.calls), **made})
            choice.calls.append(made)
        return added

    def finish_of(self, choice: int) -> str:
        return self._choices[choice].finish or "stop"

    def whole(self) -> list[dict[str, Any]]:
        return [
            {
                "index": i,
                "message": _message(choice),
                "finish_reason": choice.finish,
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._wants else None,
            }
            for i, choice in enumerate(self._choices)
        ]


def _message(choice: _Choice) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.calls:
        message |= {"content": choice.text.strip() or None, "tool_calls": choice.calls}
    return message


def _delta(
    index: int, delta: dict[str, Any], logprobs: list[dict[str, Any]] | None = None, finish: str | None = None
) -> dict[str, Any]:
    found = {"content": logprobs, "refusal": None} if logprobs else None
    return {"index": index, "delta": delta, "logprobs": found, "finish_reason": finish}


async def chat(served: Served, body: Chat, begin: float) -> tuple[Answering, ChatForm]:
    """Ask the engine for what a checked body wants."""
    _check_together(body)
    tools, forced, name = _tools(body)
    prompt = await prompt_of(served, body, body.messages, None if forced == "none" else tools)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = truncated(prompt, body.truncate_prompt_tokens, wanted, served)
    room = answer_room(len(prompt), wanted, served, "messages")
    structure = structure_of(body)
    one = body.parallel_tool_calls is False
    if forced == "required":
        refuse_beside_calls(body)
        structure = json_structure(forced_schema(tools, name, one=one), "tools")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    wish = wish_of(
        body,
        max_tokens=room,
        most_s=served.serve.timeout_s,
        structure=structure,
        logprobs=logprobs,
        defaults=served.defaults,
        bad_tokens=served.texts.bad_tokens(body.bad_words),
    )
    is_json = structure is not None and structure.kind == "json_schema"
    family = served.tools if tools and forced == "auto" and not is_json else None
    keep = special_tokens(family) if family else frozenset[str]()
    detokenizer = served.texts.detokenizer(keep, skip_special=body.skip_special_tokens is not False)
    answering = Answering(
        served.engine, [prompt], wish, detokenizer, served.texts.eos_ids, stream=bool(body.stream), begin=begin
    )
    names = [tool.function.name for tool in tools]

    def stream() -> ToolStream | None:
        if forced == "required":
            return Forced(name, names)
        return tool_stream(family, names) if family else None

    choices = [_Choice(stream()) for _ in answering.texts]
    return answering, ChatForm(choices, body, served.texts, named=name is not None)


def _check_together(body: Chat) -> None:
    """Problem 400 where one field needs, or contradicts, another."""
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs is given without logprobs; add logprobs: true", "top_logprobs")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")


def _tools(body: Chat) -> tuple[list[Tool], str, str | None]:
    """(tools, none | auto | required, the function that has to be called)."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice asks for a call and there are no tools; add them", "tool_choice")
        return [], "none", None
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        if all(tool.function.name != name for tool in tools):
            raise bad(f"tool_choice names '{name}', which is not among the tools; correct it", "tool_choice")
        return tools, "required", name
    return tools, choice or "auto", None


async def prompt_of(
    served: Served, body: Chat | Tokenize, messages: list[Message], tools: list[Tool] | None, *, aside: bool = False
) -> list[int]:
    """Token ids of a conversation; `aside`: no answer is wanted of it."""
    variables = body.chat_template_kwargs or {}
    if not _FIXED.isdisjoint(variables):
        raise bad("chat_template_kwargs names what the request itself says; leave it out", "chat_template_kwargs")
    trusts = served.serve.trust_request_chat_template
    if "chat_template" in variables or (body.chat_template is not None and not trusts):
        raise bad(
            "chat_template of a request is not trusted here; leave it out, or start the server with --set "
            "serve.trust_request_chat_template=true and send it as a field",
            "chat_template",
        )
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        raise bad(
            "continue_final_message and add_generation_prompt exclude each other; give one of them",
            "continue_final_message",
        )
    opens = body.add_generation_prompt is not False and not continues
    cut = isinstance(body, Chat) and body.truncate_prompt_tokens is not None
    plain = [_plain(message, i) for i, message in enumerate(messages)]
    if not served.texts.knows_developer:
        plain = [message | {"role": "system"} if message["role"] == "developer" else message for message in plain]
    ids = await served.texts.chat(
        plain,
        served.serve.max_body_bytes if cut else served.max_model_len,
        tools=[_without_none(to_builtins(tool)) for tool in tools] if tools else None,
        add_generation_prompt=opens,
        continue_final=continues,
        template=body.chat_template,
        variables=variables,
        aside=aside,
    )
    if not ids:
        raise bad("the chat template makes no token of these messages; check them", "messages")
    return ids


def _without_none(value: Any) -> Any:
    """What was left out is not there for a template."""
    if not isinstance(value, dict):
        return value
    return {key: _without_none(item) for key, item in value.items() if item is not None}


def _plain(message: Message, place: int) -> dict[str, Any]:
    """A message as templates expect it: text, and arguments as objects."""
    found: dict[str, Any] = _without_none(to_builtins(message))
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                raise bad(
                    f"messages[{place}] has a part of type {part.type!r}; this model reads text",
                    f"messages[{place}].content",
                )
        content = "".join(part.text or "" for part in content)
    found["content"] = content or ""
    if message.tool_calls:
        found["tool_calls"] = [_call(call) for call in message.tool_calls]
    return found


def _call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    if isinstance(arguments, str) or arguments is None:
        try:
            loaded = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            loaded = None
        arguments = loaded if isinstance(loaded, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({"id": call.id} if call.id else {})
