"""Chat templates: from a list of messages to the text a model was tuned on, as Hugging Face folders write it.

Templates come with models and are untrusted: they run in Jinja's immutable sandbox and see plain JSON values only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.errors import BadInput, BadModel, MissingPart, NotFound

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

_MARKS = ("armillary_answer_begins", "armillary_answer_ends")
_END = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING = ("reasoning_content", "thinking", "reasoning")


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template source; files beside the tokenizer take precedence over the entry in tokenizer_config.json."""
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    return templates or _configured(config.get("chat_template"), folder)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadModel(f"{path} is not text in UTF-8; save it as UTF-8") from None


def _configured(entry: Any, folder: Path) -> dict[str, str]:
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (TypeError, KeyError):
        raise BadModel(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of name and template; "
            "fix it or put the template in chat_template.jinja"
        ) from None


def pick(templates: Mapping[str, str], *, tools: Sequence[Any] | None) -> str:
    """The template for this call: `tool_use` where there are tools and it exists, else `default`."""
    if not templates:
        raise NotFound("this tokenizer has no chat template; add chat_template.jinja to its folder or send plain text")
    if tools is not None and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        names = ", ".join(sorted(templates))
        raise BadModel(f"none of the chat templates ({names}) is named default; rename one in tokenizer_config.json")
    return templates["default"]


def render(
    source: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any],
    marks: tuple[str, str] | None = None,
    continue_final: bool = False,
) -> str:
    """The prompt as text; `variables` are the special tokens and whatever else the template reads; `marks` are put
    around the parts that the template marks as the assistant's; `continue_final` leaves the last message open."""
    if not messages:
        raise BadInput("a chat needs at least one message; add one like {'role': 'user', 'content': '…'}")
    template = _compiled(source)
    import jinja2

    if continue_final:
        messages = [*messages[:-1], _tagged(messages[-1])]
    values = {"documents": None} | dict(variables)
    if marks is not None:
        values |= dict(zip(_MARKS, marks, strict=True))
    values |= {"messages": [_message(item) for item in messages], "tools": tools and list(tools)}
    try:
        text = template.render(add_generation_prompt=add_generation_prompt, **{k: _plain(v) for k, v in values.items()})
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        reason = " ".join(str(error).split())
        raise BadInput(f"the chat template refuses these messages: {reason}; check their roles and content") from error
    return _open(text) if continue_final else text


def _tagged(message: Message) -> Message:
    """A message with a tag by which its end can be found in the rendered text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, str):
        raise BadInput("the last message has no text that could be continued; give its content as text")
    return dict(message) | {"content": content + _END}


def _open(text: str) -> str:
    """Everything before the end of the last message (as in transformers: a template that trims messages has trimmed the
    tag's space too)."""
    at = text.rfind(_END.strip())
    if at < 0:
        raise BadInput(
            "the chat template leaves out what the last message says, so it cannot be continued; leave out "
            "continue_final_message"
        )
    return text[:at] if text[at:].startswith(_END) else text[:at].rstrip()


def _message(message: Message) -> dict[str, Any]:
    """A message whose reasoning, under any of its names, has the names that templates read."""
    if not isinstance(message, Mapping):
        raise BadInput(f"a chat message is a table with role and content, not {message!r}")
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning} | dict(message) | {"reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy made of JSON types only, so that a template cannot reach methods of the caller's objects."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    raise BadInput(f"chat messages hold text, numbers, lists and tables, not {type(value).__name__}; convert it first")


# --- Jinja, imported lazily: most verbs never render a chat


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    try:
        import jinja2
    except ImportError:
        raise MissingPart("a chat template needs jinja2: pip install 'jinja2>=3.1.6'") from None
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise BadModel(
            f"the chat template does not parse (line {error.lineno}: {error.message}); fix it in the tokenizer's folder"
        ) from error


def _environment() -> jinja2.Environment:
    """The environment that Hugging Face templates are written for: block trimming, loop controls, and its globals."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), "jinja2.ext.loopcontrols"]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    return environment


def _generation_block() -> type[jinja2.ext.Extension]:
    """`{% generation %}…{% endgeneration %}` marks what the assistant wrote; it renders as its content, with marks
    around it where they are requested (a variable that is not given renders as nothing)."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationExtension(Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 reads a class attribute

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(name, "load")]).set_lineno(line) for name in _MARKS)
            # its own scope: variables set inside are not visible outside, as in transformers
            return nodes.Scope([begin, *body, end]).set_lineno(line)

    return GenerationExtension


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which models have not been tuned on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
