"""Which tokens are learnt: exactly what the assistant writes, in the context it writes it in, whatever the template."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from armillary.errors import BadData
from armillary.model.text.tokenizer import Tokenizer
from armillary.model.text.train_tokenizer import CHAT_TEMPLATE, train_tokenizer
from armillary.training.chat_data.answer_mask import Sample, samples
from armillary.training.chat_data.conversation import TEMPLATES, Conversation, conversation

UNMARKED = re.sub(r"\{%- (end)?generation %\}", "", CHAT_TEMPLATE)
# reasoning is shown in the last turn only, as Qwen3 and DeepSeek-R1 do it
FORGETFUL = """{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and not loop.last %}
        {%- set content = content.split('</think>')[-1].lstrip() %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# what is asked for begins with a mark that the finished text does not have, as in DeepSeek-R1
PROMPTED = FORGETFUL.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
# no generation prompt at all; the end of an answer is the end of text, as in Llama 2
INST = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + ' ' + eos_token }}{%- endif %}
{%- endfor %}"""
# headers without a generation prompt
HEADERS = "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
# the system message moves to the last question, as in Mistral's
MOVING = """{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n' %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set last = loop.index0 >= messages | length - 2 %}
        {{- '[INST] ' + (system if last else '') + message.content + ' [/INST]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""
TEMPLATE = {
    "marked": CHAT_TEMPLATE,
    "plain": TEMPLATES["plain"],
    "unmarked": UNMARKED,
    "forgetful": FORGETFUL,
    "prompted": PROMPTED,
    "inst": INST,
    "headers": HEADERS,
    "moving": MOVING,
}

TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "<think>easy</think>\nFour."},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>still easy</think>\nSix."},
]


@pytest.fixture(scope="module")
def base() -> Tokenizer:
    return train_tokenizer(["What is the sum? Four. Six. Be short. assistant user system"] * 3, 320)


def having(base: Tokenizer, template: str) -> Tokenizer:
    return replace(base, templates={"default": TEMPLATE.get(template, template)})


def talk(messages: list[dict[str, Any]], **more: Any) -> Conversation:
    return conversation({"messages": messages} | more, "talk.jsonl:1")


def learnt(tokenizer: Tokenizer, sample: Sample) -> list[tuple[str, str]]:
    """(what was seen, what is learnt) of each stretch of answers, as text."""
    found, i = [], 0
    while i < len(sample.ids):
        if not sample.answers[i]:
            i += 1
            continue
        end = next((j for j in range(i, len(sample.ids)) if not sample.answers[j]), len(sample.ids))
        texts = (tokenizer.decode(ids, skip_special=False) for ids in (sample.ids[:i], sample.ids[i:end]))
        found.append(tuple(texts))
        i = end
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("marked", [["<think>easy</think>\nFour.<|im_end|>", "<think>still easy</think>\nSix.<|im_end|>"]]),
        ("unmarked", [["<think>easy</think>\nFour.<|im_end|>", "<think>still easy</think>\nSix.<|im_end|>"]]),
        ("plain", [[" <think>easy</think>\nFour.<|endoftext|>", " <think>still easy</think>\nSix.<|endoftext|>"]]),
        ("forgetful", [["<think>easy</think>\nFour.<|im_end|>"], ["<think>still easy</think>\nSix.<|im_end|>"]]),
        ("inst", [["<think>easy</think>\nFour. <|endoftext|>", "<think>still easy</think>\nSix. <|endoftext|>"]]),
        ("moving", [["<think>easy</think>\nFour.<|endoftext|>"], ["<think>still easy</think>\nSix.<|endoftext|>"]]),
        ("headers", [["<think>easy</think>\nFour.\n\n", "<think>still easy</think>\nSix.\n\n"]]),
    ],
)
def test_answers_are_learnt_and_nothing_else(base: Tokenizer, template: str, expected: list[list[str]]) -> None:
    tokenizer = having(base, template)
    found = [learnt(tokenizer, sample) for sample in samples(tokenizer, talk(TALK))]
    assert [[answer for _, answer in sample] for sample in found] == expected


@pytest.mark.parametrize("template", ["marked", "unmarked", "forgetful", "inst", "moving", "plain"])
def test_every_answer_is_seen_as_it_will_be_asked_for(base: Tokenizer, template: str) -> None:
    """What stands before an answer is the prompt that generation starts from; to the letter, but for blanks that a
    template without a generation prompt puts there."""
    tokenizer = having(base, template)
    seen = [before for sample in samples(tokenizer, talk(TALK)) for before, _ in learnt(tokenizer, sample)]
    asked = [tokenizer.chat(TALK[:2]), tokenizer.chat(TALK[:4])]
    assert seen == [text + " " * (template in ("inst", "moving")) for text in asked]


def test_a_prompt_that_the_finished_text_lacks_is_left_alone(base: Tokenizer) -> None:
    """The prompt ends with <think>, the text does not have to: the answer begins right after what both have."""
    tokenizer = having(base, "prompted")
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello <b>you</b>"}]
    (sample,) = samples(tokenizer, talk(messages))
    assert learnt(tokenizer, sample)[0][1] == "Hello <b>you</b><|im_end|>"
    thought = [messages[0], {"role": "assistant", "content": "<think>\nhm</think>Hello"}]
    (sample,) = samples(tokenizer, talk(thought))
    assert learnt(tokenizer, sample)[0] == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n",
        "hm</think>Hello<|im_end|>",
    )


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cn", "Co"]), min_size=1, max_size=30).filter(
    lambda text: text.strip() == text and "</think>" not in text
)


@settings(max_examples=60, deadline=None)
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4), template=st.sampled_from(sorted(TEMPLATE)))
def test_any_text_in_any_template(turns: list[tuple[str, str]], template: str) -> None:
    """Each answer is learnt once, whole, with nothing of a question in it."""
    tokenizer = having(_base(), template)
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]  # noqa: B905
    found = [each for sample in samples(tokenizer, talk(messages)) for each in learnt(tokenizer, sample)]
    assert len(found) == len(turns)
    for (before, answer), (question, said) in zip(found, turns, strict=True):
        assert question in before
        ends = ("<|im_end|>", "<|endoftext|>", "\n\n")
        assert answer.removesuffix(next(end for end in ends if answer.endswith(end))).strip() == said


_KEPT: list[Tokenizer] = []


def _base() -> Tokenizer:
    if not _KEPT:
        _KEPT.append(train_tokenizer(["What is the sum? Four. Six."] * 3, 320))
    return _KEPT[0]


def test_marks_agree_with_transformers(tmp_path: Path, base: Tokenizer) -> None:
    import transformers

    having(base, "marked").save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        TALK, return_dict=True, return_assistant_tokens_mask=True
    )
    (sample,) = samples(Tokenizer.load(tmp_path), talk(TALK))
    length = len(sample.ids)
    assert theirs["input_ids"][:length] == sample.ids
    assert [bool(on) for on in theirs["assistant_masks"][:length]] == sample.answers
    assert not any(theirs["assistant_masks"][length:])


def test_tool_calls_are_answers(base: Tokenizer) -> None:
    template = """{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
    {%- for call in m.tool_calls or [] %}{{- '<tool>' + call.function | tojson + '</tool>' }}{%- endfor %}
    {{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
    tokenizer = having(base, template)
    function = {"name": "add", "arguments": {"a": 1}}
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    asked = [TALK[1], call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "Four."}]
    (sample,) = samples(tokenizer, talk(asked, tools=[{"name": "add"}]))
    answers = [answer for _, answer in learnt(tokenizer, sample)]
    assert answers == ['<tool>{"name": "add", "arguments": {"a": 1}}</tool><|im_end|>', "Four.<|im_end|>"]


def test_weight_0_is_seen_but_not_learnt(base: Tokenizer) -> None:
    quiet = [*TALK[:2], TALK[2] | {"weight": 0}, *TALK[3:]]
    for template in ("marked", "unmarked"):
        tokenizer = having(base, template)
        (sample,) = samples(tokenizer, talk(quiet))
        ((before, answer),) = learnt(tokenizer, sample)
        assert "Four." in before and answer == "<think>still easy</think>\nSix.<|im_end|>"
    assert samples(having(base, "marked"), talk([TALK[1], TALK[2] | {"weight": 0}])) == []


def test_a_token_across_the_border_is_learnt(base: Tokenizer) -> None:
    """Where the prompt's last character and the answer's first are one token, that token carries the answer."""
    tokenizer = train_tokenizer([" yes no yes no"] * 50, 280)
    tokenizer = having(tokenizer, "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}")
    (sample,) = samples(tokenizer, talk([{"role": "user", "content": "yes"}, {"role": "assistant", "content": "no"}]))
    ((before, answer),) = learnt(tokenizer, sample)
    assert before == "user: yes\nassistant:" and answer.strip() == "no"


def test_a_prefix_token_without_characters_goes_with_its_answer() -> None:
    """Tokenizers that put a mark before each piece of text give it no characters of its own."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {text: i for i, text in enumerate(["▁", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz:"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="▁"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    template = "{% for m in messages %}{{ '<s>' + m.content + '</s>' }}{% endfor %}"
    tokenizer = Tokenizer(
        backend=backend, special_tokens={"eos_token": "</s>"}, eos_ids=(2,), templates={"default": template}
    )
    (sample,) = samples(tokenizer, talk([{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]))
    chosen = [backend.id_to_token(i) for i, on in zip(sample.ids, sample.answers, strict=True) if on]
    assert chosen == ["▁", "c", "d", "</s>"]


def test_what_the_template_refuses_is_said_with_its_place(base: Tokenizer) -> None:
    tokenizer = having(base, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadData, match=r"talk.jsonl:1: .*roles must alternate"):
        samples(tokenizer, talk(TALK))
    with pytest.raises(BadData, match="leaves nothing of the answer in message 3"):
        samples(having(base, "{% for m in messages %}{{ m.role }}{% endfor %}"), talk(TALK))
    with pytest.raises(BadData, match="U\\+FDD0"):
        samples(having(base, "marked"), talk([TALK[1], {"role": "assistant", "content": "a\ufdd0b"}]))
