"""Tokenizers of Hugging Face folders, beside transformers on the same folder."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from armillary.errors import BadInput, BadModel, NotFound
from armillary.model.text.tokenizer import Detokenizer, Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "pack my box with five dozen liquor jugs",
    "été 東京 🙂 12 345",
] * 3
TEXTS = ["the fox", " the  fox\n\tjumps ", "", "été 東京 🙂‍🔥", "<s>the</s> <|end|>fox", "a\x00b", "x" * 50, "12 345"]


def byte_level() -> tokenizers.Tokenizer:
    """Like Llama 3 or Qwen: byte-level BPE."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2 or Gemma: words with ▁, and a token for each byte of what the vocabulary lacks."""
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [
        *specials,
        *(f"<0x{number:02X}>" for number in range(256)),
        "▁",
        *sorted(set("".join(CORPUS[:2])) - {" "}),
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("f", "o"), ("fo", "x"), ("▁", "fox")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in specials])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return backend


BACKENDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def write_folder(folder: Path, backend: tokenizers.Tokenizer, **files: object) -> Path:
    """A folder with tokenizer.json and one JSON file per keyword."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, table in files.items():
        (folder / f"{name}.json").write_text(json.dumps(table))
    return folder


CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def agree(folder: Path) -> Tokenizer:
    """Our tokenizer of a folder, after checking that transformers gives the same ids and texts."""
    from transformers import AutoTokenizer

    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.encode(text, special=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert dict(ours.special_tokens) == theirs.special_tokens_map
    return ours


@pytest.mark.parametrize("kind", BACKENDS)
def test_ids_and_texts_equal_transformers(tmp_path: Path, kind: str) -> None:
    ours = agree(write_folder(tmp_path, BACKENDS[kind], tokenizer_config=CONFIG))
    assert ours.eos_ids == (ours.backend.token_to_id("</s>"),)
    assert ours.pad_id is None


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("add", [True, False])
def test_add_bos_token_means_what_transformers_takes_it_for(tmp_path: Path, kind: str, add: bool) -> None:
    agree(write_folder(tmp_path, BACKENDS[kind], tokenizer_config=CONFIG | {"add_bos_token": add}))


def test_a_class_that_transformers_rebuilds_in_code(tmp_path: Path) -> None:
    backend = byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", False)
    config = CONFIG | {"tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>", "legacy": False}
    agree(write_folder(tmp_path, backend, tokenizer_config=config))


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    ours = Tokenizer.load(write_folder(tmp_path, backend, tokenizer_config=CONFIG))
    assert ours.decode(ours.encode("the quick brown fox")) == "the quick brown fox"


def test_special_tokens_as_tables_and_in_special_tokens_map(tmp_path: Path) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    special = {"bos_token": {"content": "<s>", **flags}, "eos_token": "</s>", "pad_token": {"content": "</s>", **flags}}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "not this one"}
    ours = agree(write_folder(tmp_path, byte_level(), tokenizer_config=config, special_tokens_map=special))
    assert ours.pad_id == ours.eos_id


def test_special_tokens_that_tokenizer_json_lacks_are_added(tmp_path: Path) -> None:
    config = CONFIG | {
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|end|>", "<|tool|>"],
        "eoi_token": "<|eoi|>",
    }
    ours = agree(write_folder(tmp_path, byte_level(), tokenizer_config=config))
    assert ours.decode(ours.encode("a<|end|>b")) == "ab"
    assert ours.pad_id == byte_level().get_vocab_size()


def test_added_tokens_decoder_wins_over_a_leftover_special_tokens_map(tmp_path: Path) -> None:
    added = {"320": {"content": "<|end|>", "special": True, "lstrip": True, "normalized": False}}
    config = CONFIG | {"eos_token": "<|end|>", "added_tokens_decoder": added}
    folder = write_folder(tmp_path, byte_level(), tokenizer_config=config, special_tokens_map={"eos_token": "</s>"})
    assert agree(folder).eos_id == 320


@pytest.mark.parametrize(("ends", "expected"), [(5, (1, 5)), ([5, 1, 7], (1, 5, 7)), (None, (1,))])
def test_generation_config_may_name_more_ends(tmp_path: Path, ends: object, expected: tuple[int, ...]) -> None:
    generation = {"eos_token_id": ends, "temperature": 0.6}
    folder = write_folder(tmp_path, byte_level(), tokenizer_config=CONFIG, generation_config=generation)
    assert Tokenizer.load(folder).eos_ids == expected


@pytest.mark.parametrize("kind", BACKENDS)
def test_saved_and_loaded_again_it_is_the_same(tmp_path: Path, kind: str) -> None:
    config = CONFIG | {"pad_token": "<|pad|>", "chat_template": "{{ messages[0].content }}", "model_max_length": 99}
    files = {"tokenizer_config": config, "generation_config": {"eos_token_id": [2, 7]}}
    first = Tokenizer.load(write_folder(tmp_path / "a", BACKENDS[kind], **files))
    first.save(tmp_path / "b")
    second = agree(tmp_path / "b")
    assert second.fingerprint == first.fingerprint
    assert (second.special_tokens, second.eos_ids, second.templates) == (
        first.special_tokens,
        first.eos_ids,
        first.templates,
    )
    assert second.config["model_max_length"] == 99


def test_saving_leaves_a_generation_config_alone(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    Tokenizer.load(write_folder(tmp_path / "a", byte_level(), tokenizer_config=CONFIG)).save(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.6}


def test_documents_end_with_eos_and_cannot_forge_one(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, byte_fallback(), tokenizer_config=CONFIG))
    plain, forged = ours.encode_documents(["the fox", "the</s> fox"])
    assert plain == [*ours.encode("the fox"), ours.eos_id]
    assert forged.count(ours.eos_id) == 1 and forged[-1] == ours.eos_id
    assert ours.decode(forged) == "the</s> fox"


# --- streaming


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_folder(tmp_path_factory.mktemp("tokenizer"), BACKENDS[request.param], tokenizer_config=CONFIG)
    return Tokenizer.load(folder)


@settings(deadline=None, max_examples=60)
@given(text=st.text())
def test_streaming_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode(text)]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(tokenizer.encode(text))


@settings(deadline=None, max_examples=100)
@given(data=st.data(), skip=st.booleans())
def test_streaming_any_ids_adds_up_to_one_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    stream = Detokenizer(tokenizer, skip_special=skip)
    text = "".join(stream.push(token) for token in ids) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special=skip)


def test_streaming_gives_text_early(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode("the lazy dog")]
    assert len([piece for piece in pieces if piece]) > 3
    assert stream.finish() == ""


# --- errors are one line


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no tokenizer.json in .*; give a Hugging Face folder"):
        Tokenizer.load(tmp_path)


_PANIC = {"type": "BPE", "continuing_subword_prefix": "##", "vocab": {"a": 0}, "merges": [["a", "a"]]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"version": "1.0", "model": {"type": "BPE",\n',
        "\x00\xff",
        json.dumps({"model": _PANIC}),
    ],
)
def test_a_broken_tokenizer_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(BadModel, match=r"tokenizer.json cannot be read \(.*\); fetch the folder again") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", " is not JSON"),
        ("[]", " does not hold a JSON object"),
        ('{"added_tokens_decoder": {"x": {}}}', ": added_tokens_decoder is no table of tokens by id"),
        ('{"added_tokens_decoder": {"7": "<s>"}}', ": added_tokens_decoder is no table of tokens by id"),
    ],
)
def test_a_broken_tokenizer_config(tmp_path: Path, text: str, why: str) -> None:
    write_folder(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(BadModel, match=f"tokenizer_config.json{why}"):
        Tokenizer.load(tmp_path)


def test_text_that_is_not_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadInput, match="remove lone surrogates"):
        tokenizer.encode("\ud800")


def test_a_tokenizer_without_chat_template(tokenizer: Tokenizer) -> None:
    with pytest.raises(NotFound, match=r"has no chat template; add chat_template.jinja"):
        tokenizer.chat([{"role": "user", "content": "hi"}])
