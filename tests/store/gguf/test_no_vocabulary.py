"""A model without a tokenizer in GGUF: the file says so, because llama.cpp refuses one that says nothing."""

from pathlib import Path

import pytest

from armillary.store.gguf.gguf_fields import tokenizer_fields
from armillary.store.gguf.gguf_header import GgufHeader
from armillary.store.gguf.gguf_tokenizer import tokenizer_files


def test_it_is_written_and_read_back(tmp_path: Path) -> None:
    fields = tokenizer_fields(tmp_path, 64)
    assert fields == {"tokenizer.ggml.model": "none"}
    header = GgufHeader.__new__(GgufHeader)
    object.__setattr__(header, "metadata", fields)
    assert tokenizer_files(header) == {}


@pytest.mark.parametrize("name", ["none", "no_vocab"])
def test_both_of_the_names_that_llama_cpp_takes(name: str) -> None:
    header = GgufHeader.__new__(GgufHeader)
    object.__setattr__(header, "metadata", {"tokenizer.ggml.model": name})
    assert tokenizer_files(header) == {}
