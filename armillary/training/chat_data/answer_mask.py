"""Which tokens of a conversation are answers: those the model would itself have written, and no others.

Each answer is found in the text the model sees when it writes it: the messages up to there. Templates that show earlier
turns differently later on (reasoning dropped, tools moved) give one sample for each such view, so that an answer is
always learnt in the context it is asked for in; turns that stay as they were share one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from armillary.errors import ArmillaryError, BadData, BadInput
from armillary.model.text.tokenizer import Tokenizer
from armillary.training.chat_data.conversation import Conversation

Span = tuple[int, int]
_MARKS = ("\ufdd0", "\ufdd1")  # noncharacters: no text has them
_STANDS_IN = ("\ufdd2A", "\ufdd3B")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Token ids up to the last answer, and for each of them whether it belongs to an answer."""

    ids: list[int]
    answers: list[bool]


def samples(tokenizer: Tokenizer, talk: Conversation) -> list[Sample]:
    """The conversation as ids, in one piece unless the template shows earlier turns differently later on."""
    if any(mark in talk.identity for mark in _MARKS):
        raise BadData(f"{talk.origin} holds U+FDD0 or U+FDD1, which are no characters; take them out")
    views: list[tuple[str, list[Span]]] = []
    for number in talk.answers:
        text, spans = _view(tokenizer, talk, number)
        if views and text[: views[-1][1][-1][1]] == views[-1][0][: views[-1][1][-1][1]]:
            views[-1] = (text, views[-1][1] + spans)
        else:
            views.append((text, spans))
    return [sample for text, spans in views if (sample := _encoded(tokenizer, text, spans)) is not None]


def _encoded(tokenizer: Tokenizer, text: str, spans: list[Span]) -> Sample | None:
    """A token is an answer's if any of its characters is; what follows the last answer is left out."""
    ids, places = tokenizer.encode_places(text)
    answers, number = [False] * len(ids), 0
    for i, (begin, end) in enumerate(places):
        while number < len(spans) and spans[number][1] <= begin:
            number += 1
        if number == len(spans):
            break
        first, last = spans[number]
        answers[i] = begin < last and (end > first or begin == end == first)
    length = max((i + 1 for i, on in enumerate(answers) if on), default=0)
    return Sample(ids=ids[:length], answers=answers[:length]) if length > 1 else None


# --- where an answer is


def _view(tokenizer: Tokenizer, talk: Conversation, number: int) -> tuple[str, list[Span]]:
    """The text up to and with message `number`, and the stretches of it that the assistant writes there."""
    text, marked = _unmarked(_render(tokenizer, talk, number + 1, marks=_MARKS))
    if marked:
        before = len(_unmarked(_render(tokenizer, talk, number, marks=_MARKS))[1]) if number else 0
        spans = [span for span in marked[before:] or marked[-1:] if span[0] < span[1]]
    else:
        begin = _begin(tokenizer, talk, number, text)
        spans = [(begin, _end(tokenizer, text, begin))]
    if not spans or spans[0][0] >= spans[-1][1]:
        raise BadData(
            f"{talk.origin}: the chat template leaves nothing of the answer in message {number + 1}; "
            "mend the record or give it weight 0"
        )
    return text, spans


def _render(
    tokenizer: Tokenizer,
    talk: Conversation,
    count: int,
    *,
    prompt: bool = False,
    marks: tuple[str, str] | None = None,
    last: str | None = None,
) -> str:
    """The first `count` messages as text; `last` stands in for what the last one says."""
    messages = [{name: value for name, value in each.items() if name != "weight"} for each in talk.messages[:count]]
    if last is not None:
        messages[-1] = {"role": messages[-1]["role"], "content": last}
    tools = list(talk.tools) if talk.tools is not None else None
    try:
        return tokenizer.chat(messages, tools=tools, add_generation_prompt=prompt, marks=marks, **talk.extra)
    except BadInput as error:
        raise BadData(f"{talk.origin}: {error}") from None


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """The text without its marks, and the stretches that were between them."""
    pieces, spans, length = [], [], 0
    for i, part in enumerate(text.split(_MARKS[0])):
        inside, _, after = part.partition(_MARKS[1]) if i else ("", "", part)
        spans += [(length, length + len(inside))] if i else []
        pieces += [inside, after]
        length += len(inside) + len(after)
    return "".join(pieces), spans


def _begin(tokenizer: Tokenizer, talk: Conversation, number: int, text: str) -> int:
    """Where an answer begins that no mark shows: behind the prompt, if the template has one and keeps it; else where
    two answers of which nothing is alike would first differ."""
    if number:
        bare, prompt = (_render(tokenizer, talk, number, prompt=prompt) for prompt in (False, True))
        if prompt != bare and text.startswith(prompt):
            return len(prompt)
    try:
        alternatives = [_render(tokenizer, talk, number + 1, last=last) for last in _STANDS_IN]
    except ArmillaryError:  # a template that takes no other content: the prompt is all there is to go by
        alternatives = [prompt] if number else []
    alike = takewhile(lambda column: len(set(column)) == 1, zip(text, *alternatives, strict=False))
    return sum(1 for _ in alike) if alternatives else 0


def _end(tokenizer: Tokenizer, text: str, begin: int) -> int:
    """Behind the last token that ends a turn, where only blanks follow it; else the end of the text."""
    ends = (text.rfind(mark, begin) + len(mark) for mark in _turn_ends(tokenizer) if text.rfind(mark, begin) >= 0)
    last = max(ends, default=len(text))
    return last if not text[last:].strip() else len(text)


@lru_cache(maxsize=8)
def _turn_ends(tokenizer: Tokenizer) -> Sequence[str]:
    """The texts of special tokens, and of those that end a generation."""
    tokens = (tokenizer.backend.id_to_token(each) for each in {*tokenizer.eos_ids, *tokenizer.special_ids})
    return tuple(sorted(text for text in tokens if text))
