"""Chat templates in the styles models come with, beside transformers' rendering of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from armillary.errors import BadInput, BadModel
from armillary.model.text.tokenizer import Tokenizer

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
<|header|>system<|/header|>

Today: {{ date_string }}
{{ system }}<|eot|>
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}{{- raise_exception("one tool call at a time") }}{%- endif %}
        {{- '<|header|>assistant<|/header|>\\n\\n' + message.tool_calls[0].function | tojson + '<|eot|>' }}
    {%- else %}
        {{- '<|header|>' + message['role'] + '<|/header|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant<|/header|>\\n\\n' }}{%- endif %}
"""

CHATML_TOOLS = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools <&>\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last_user=-1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last_user = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == "assistant" and message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' ~ (call.function.arguments | tojson(indent=2, sort_keys=true)) ~ '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' ~ ('!' if loop.index0 == ns.last_user else '') ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

MISTRAL = """{%- if documents %}{{ documents | length }} documents {% endif %}
{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant/user/…') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ message['content'] + eos_token }}
    {% endif %}
{% endfor %}
"""

GEMMA = """{{ bos_token }}{%- macro turn(role, content) -%}
<start_of_turn>{{ role }}
{% if content is string %}{{ content | trim }}{% elif content is iterable %}{% for item in content %}
{% if item['type'] == 'image' %}<image>{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}
{% endfor %}{% endif %}<end_of_turn>
{% endmacro -%}
{%- for message in messages -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {%- if role == 'model' -%}{% generation %}{{ turn(role, message['content']) }}{% set leak = 1 %}{% endgeneration %}
    {%- else -%}{{ turn(role, message['content']) }}{%- endif -%}
    {{ leak is defined }}
{%- endfor -%}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": " <b>Hi & 'hello'</b> é "},
    {"role": "assistant", "content": "Yo\n"},
    {"role": "user", "content": "More"},
]
WITH_SYSTEM = [{"role": "system", "content": " Be brief. "}, *TALK]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "\nlook <it> up\n",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "weather", "arguments": {"place": "Zürich", "days": [1, 2.5, None]}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "<clear>"}'},
]
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " what? "}]}]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "größe <1> & 'more'", "parameters": {}}}]


EOS = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}


def folder_with(folder: Path, template: object) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizers.Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, [])).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return folder


CASES = [
    pytest.param(LLAMA_3, WITH_SYSTEM, {}, id="llama-3"),
    pytest.param(LLAMA_3, TALK, {"date_string": "1 Jan 2020"}, id="llama-3 with a date"),
    pytest.param(LLAMA_3, CALLS, {}, id="llama-3 calling a tool"),
    pytest.param(CHATML_TOOLS, WITH_SYSTEM, {"tools": TOOLS}, id="chatml with tools"),
    pytest.param(CHATML_TOOLS, CALLS, {"tools": TOOLS, "enable_thinking": False}, id="chatml calling a tool"),
    pytest.param(CHATML_TOOLS, CALLS[2:] + TALK, {"tools": []}, id="chatml with an empty list of tools"),
    pytest.param(MISTRAL, TALK, {"documents": [{"title": "a", "text": "b"}]}, id="mistral with documents"),
    pytest.param(MISTRAL, TALK, {}, id="mistral"),
    pytest.param(GEMMA, TALK, {}, id="gemma"),
    pytest.param(GEMMA, PARTS, {}, id="gemma with parts"),
]


@pytest.mark.parametrize("prompt", [True, False], ids=["prompted", "closed"])
@pytest.mark.parametrize(("template", "messages", "extra"), CASES)
def test_equals_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], extra: dict[str, Any], prompt: bool
) -> None:
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, template)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **extra)
    assert Tokenizer.load(folder).chat(messages, add_generation_prompt=prompt, **extra) == expected


@pytest.mark.parametrize("content", ["one, two,", " one, two, ", ""], ids=["plain", "spaces", "empty"])
@pytest.mark.parametrize("template", [LLAMA_3, CHATML_TOOLS, GEMMA], ids=["llama 3", "chatml", "gemma"])
def test_a_message_is_continued_as_by_transformers(tmp_path: Path, template: str, content: str) -> None:
    from transformers import AutoTokenizer

    folder, talk = folder_with(tmp_path, template), [TALK[0], {"role": "assistant", "content": content}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, tokenize=False, continue_final_message=True
    )
    assert Tokenizer.load(folder).chat(talk, add_generation_prompt=False, continue_final=True) == expected


def test_a_message_that_the_template_leaves_out_cannot_be_continued(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, "{{ messages | length }}"))
    with pytest.raises(BadInput, match="leave out continue_final_message"):
        tokenizer.chat(TALK, add_generation_prompt=False, continue_final=True)
    with pytest.raises(BadInput, match="give its content as text"):
        tokenizer.chat([{"role": "user", "content": None}], continue_final=True)


def test_several_templates_the_tools_choose(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    entries = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    tokenizer = Tokenizer.load(folder_with(tmp_path, entries))
    assert tokenizer.chat(TALK) == "plain"
    assert tokenizer.chat(TALK, tools=TOOLS) == "tools 1"
    tokenizer.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").templates == tokenizer.templates
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").apply_chat_template(TALK, tokenize=False) == "plain"


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "from the configuration")
    (folder / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(folder).chat(TALK) == "from the file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("from the other file")
    assert Tokenizer.load(folder).chat(TALK, tools=TOOLS) == "from the other file"


@pytest.mark.parametrize(
    ("template", "messages", "why"),
    [
        (MISTRAL, TALK[1:], "refuses these messages: roles must alternate user/assistant/user/…; check"),
        (MISTRAL, [{"role": "user"}], "refuses these messages: .*; check their roles and content"),
        ("{{ messages[0].content + 1 }}", TALK, "refuses these messages: can only concatenate str"),
        ("{{ missing.more.and_more }}", TALK, "refuses these messages: 'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", TALK, "refuses these messages: access to attribute '__class__'"),
        ("{{ messages }}", [], "at least one message"),
        ("{{ messages }}", ["hi"], "a chat message is a table with role and content, not 'hi'"),
        ("{{ messages }}", [{"role": "user", "content": b"hi"}], "not bytes; convert it first"),
    ],
)
def test_messages_a_template_cannot_take(tmp_path: Path, template: str, messages: Any, why: str) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, template))
    with pytest.raises(BadInput, match=why) as caught:
        tokenizer.chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% if %}", r"does not parse \(line 1: .*\); fix it"),
        ([{"name": "rag", "template": ""}, {"name": "other", "template": ""}], r"\(other, rag\) is named default"),
        ([{"template": "no name"}], "neither text nor a list of name and template"),
        (17, "neither text nor a list of name and template"),
    ],
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: object, why: str) -> None:
    with pytest.raises(BadModel, match=why):
        Tokenizer.load(folder_with(tmp_path, template)).chat(TALK)


def test_a_template_cannot_change_the_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, "{{ messages.append(1) }}"))
    with pytest.raises(BadInput, match="refuses"):
        tokenizer.chat(TALK)
    assert len(TALK) == 3
