"""Fields that clients of vLLM send, through OpenAI's own client: each does what it says, or is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.tiny import CONTEXT, Server

HELLO: list[Any] = [{"role": "user", "content": "def main"}]
PERSON = {
    "type": "object",
    "additionalProperties": False,
    "required": ["age"],
    "properties": {"age": {"type": "integer", "maximum": 120, "minimum": 0}},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as found:
        yield found


def chat(client: Any, max_tokens: int = 24, **extra: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=max_tokens, temperature=0, extra_body=extra
    )


def said(client: Any, **extra: Any) -> str:
    text: str = chat(client, **extra).choices[0].message.content
    return text


GBNF = 'root ::= "yes" | "no"\n'
STRUCTURES: dict[str, tuple[dict[str, Any], str]] = {
    "guided_json": ({"guided_json": PERSON}, r'\{"age": ?\d+\}'),
    "guided_json, as text": ({"guided_json": json.dumps(PERSON)}, r'\{"age": ?\d+\}'),
    "guided_regex": ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
    "guided_choice": ({"guided_choice": ["Bonn", "Ulm"]}, "Bonn|Ulm"),
    "guided_grammar": ({"guided_grammar": 'start: "a" "b" "b"? "!"'}, "abb?!"),
    "guided_grammar, as vLLM writes them": ({"guided_grammar": GBNF}, "yes|no"),
    "structured_outputs.json": ({"structured_outputs": {"json": PERSON}}, r'\{"age": ?\d+\}'),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "x{2,4}y"}}, "x{2,4}y"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["in", "out"]}}, "in|out"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": GBNF}}, "yes|no"),
    "with a choice of library": ({"guided_choice": ["in", "out"], "guided_decoding_backend": "xgrammar"}, "in|out"),
}


@pytest.mark.parametrize(("extra", "pattern"), STRUCTURES.values(), ids=STRUCTURES)
def test_guided_answers_match(client: Any, extra: dict[str, Any], pattern: str) -> None:
    text = said(client, **extra)
    assert re.fullmatch(pattern, text), text


def test_completions_are_guided_too(client: Any) -> None:
    made = client.completions.create(model="tiny", prompt="def", max_tokens=9, extra_body={"guided_choice": ["Bonn"]})
    assert made.choices[0].text == "Bonn" and made.choices[0].finish_reason == "stop"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "white space": ({"guided_json": PERSON, "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    "a guided_ field to come": ({"guided_melody": "la"}, "guided_melody"),
    "structural tags": ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    "what nobody knows": ({"structured_outputs": {"melody": "la"}}, "melody"),
    "nothing": ({"structured_outputs": {}}, "structured_outputs"),
    "two at once": ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    "two ways at once": ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    "a call and a structure": ({"guided_regex": "a", "tools": [TOOL], "tool_choice": "required"}, "guided_regex"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json"),
    "SGLang's": ({"ebnf": 'root ::= "a"'}, "ebnf"),
    "beams": ({"use_beam_search": True}, "use_beam_search"),
    "processors": ({"logits_processors": ["a.b"]}, "logits_processors"),
    "functions of old": ({"functions": [{"name": "f"}]}, "functions"),
    "a template of one's own": ({"chat_template": "{{ messages }}"}, "chat_template"),
    "opened and continued": ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    "tokens that are not there": ({"allowed_token_ids": [10**6]}, "allowed"),
    "no tokens": ({"allowed_token_ids": []}, "allowed_token_ids"),
    "an empty bad word": ({"bad_words": [" "]}, "bad_words"),
    "no prompt left": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
}


@pytest.mark.parametrize(("extra", "name"), REFUSED.values(), ids=REFUSED)
def test_constraints_that_cannot_be_kept_are_refused_by_name(client: Any, extra: dict[str, Any], name: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as problem:
        chat(client, **extra)
    assert name in problem.value.message and "; " in problem.value.message


def test_a_field_that_is_null_or_off_is_as_if_it_were_not_there(client: Any) -> None:
    assert said(client, guided_whitespace_pattern=None, use_beam_search=False, guided_json=None) == said(client)


def test_other_unknown_fields_are_logged_once(server: Server, client: Any) -> None:
    before = server.log.read_text()
    assert said(client, melody="la", user="somebody") == said(client, melody="lo") == said(client)
    new = server.log.read_text().removeprefix(before)
    assert new.count("melody") == 1 and "ignored" in new and "user" not in new
    chat(client, **{"break\nline": 1})
    assert "break\nline" not in server.log.read_text()


def test_bad_words_do_not_come(server: Server, client: Any) -> None:
    letters = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})[1]["tokens"]
    wish: dict[str, Any] = {"allowed_token_ids": letters, "max_tokens": 40, "logit_bias": {str(t): 0 for t in letters}}
    assert set(said(client, **wish, bad_words=["a"])) == {"b"}
    assert "ab" not in said(client, **wish, bad_words=["ab"]) and "ba" not in said(client, **wish, bad_words=["ba"])
    assert said(client, **wish, bad_words=["ab", "ba"]) in ("a" * 40, "b" * 40)


def test_only_allowed_tokens_come(server: Server, client: Any) -> None:
    allowed = server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})[1]["tokens"]
    made = chat(client, allowed_token_ids=allowed)
    text = made.choices[0].message.content
    assert set(text) <= {"a", "b"} and made.usage.completion_tokens == 24 and made.choices[0].finish_reason == "length"
    assert re.fullmatch("[ab]b{2,4}", said(client, allowed_token_ids=[*allowed, 0, 3], guided_regex="[abc]b{2,4}"))


def test_constraints_that_leave_nothing_are_said(client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="leaves no token"):
        chat(client, allowed_token_ids=[5], guided_regex="zzz")


def test_prompts_are_truncated_from_the_left(server: Server, client: Any) -> None:
    long = "def main():\n" * 2000
    ids = server.post("/tokenize", {"prompt": long})[1]["tokens"]
    assert len(ids) > CONTEXT
    wish: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0}
    right = client.completions.create(prompt=ids[-50:], **wish)
    made = client.completions.create(prompt=long, **wish, extra_body={"truncate_prompt_tokens": 50})
    assert made.usage.prompt_tokens == 50 and made.choices[0].text == right.choices[0].text
    most = client.completions.create(prompt=long, **wish, extra_body={"truncate_prompt_tokens": -1})
    assert most.usage.total_tokens == CONTEXT
    short = client.chat.completions.create(messages=HELLO, **wish, extra_body={"truncate_prompt_tokens": 5})
    assert short.usage.prompt_tokens == 5


def test_stop_texts_are_included_where_asked(client: Any) -> None:
    plain = said(client, max_tokens=40)
    stop = plain[5:8]
    upto = plain[: plain.find(stop) + len(stop)]
    assert said(client, max_tokens=40, stop=[stop], include_stop_str_in_output=True) == upto
    streamed = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=40,
        temperature=0,
        stop=stop,
        stream=True,
        extra_body={"include_stop_str_in_output": True},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == upto


def test_special_tokens_are_shown_where_asked(server: Server, client: Any) -> None:
    (end,) = [token for token in range(8) if "<" in server.post("/detokenize", {"tokens": [token]})[1]["prompt"]][:1]
    name = server.post("/detokenize", {"tokens": [end]})[1]["prompt"]
    wish: dict[str, Any] = {"allowed_token_ids": [end], "ignore_eos": True, "max_tokens": 3}
    assert said(client, **wish) == "" and said(client, **wish, skip_special_tokens=False) == name * 3
    wish |= {"ignore_eos": False, "stop_token_ids": [end], "skip_special_tokens": False}
    assert said(client, **wish) == "" and said(client, **wish, include_stop_str_in_output=True) == name


def test_the_final_message_is_continued(server: Server) -> None:
    def ids(**extra: Any) -> Any:
        messages = [*HELLO, {"role": "assistant", "content": "return [1, "}]
        return server.post("/tokenize", {"messages": messages, **extra})[1]["tokens"]

    text = server.post("/detokenize", {"tokens": ids(continue_final_message=True)})[1]["prompt"]
    assert text == "[user] def main\n[assistant] return [1, "
    assert ids() != ids(add_generation_prompt=False) != ids(continue_final_message=True)
    body = {
        "messages": [*HELLO, {"role": "assistant", "content": "return [1, "}],
        "continue_final_message": True,
        "max_tokens": 4,
        "temperature": 0,
    }
    answer = server.post("/v1/chat/completions", body)[1]
    prompt = ids(continue_final_message=True)
    same = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0})[1]
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]


def test_the_document_names_them_all(server: Server) -> None:
    table = json.loads(server.get("/openapi.json")[1])["components"]["schemas"]["ChatRequest"]["properties"]
    for name in (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "chat_template",
        "continue_final_message",
        "add_generation_prompt",
    ):
        assert table[name]["description"], name
