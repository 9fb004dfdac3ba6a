"""Bodies of requests for vectors and scores: OpenAI's /v1/embeddings, Cohere's /v1/rerank, vLLM's /v1/score."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from armillary.serving.openai.schemas import StreamOptions, TokenId

_MAX_INT = 2**31 - 1
MOST_INPUTS = 2048
"""texts of one request, as in OpenAI's API"""
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Texts = Annotated[list[str], Meta(min_length=1, max_length=MOST_INPUTS)]


class PoolingFields(Struct, kw_only=True):
    """Fields that requests for vectors and scores share."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    """one of /v1/models; left out: the served model"""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    """vLLM's: use only this many tokens of each text, from its beginning; -1: as many as the model takes"""
    timeout_s: Annotated[float, Meta(ge=0.001, le=86_400)] | None = None
    """ours: time limit in seconds"""
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    """ours: only requests with the same salt share cached prefixes"""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """ours: smaller values are scheduled first"""

    @property
    def stream(self) -> bool:
        """A vector has no parts to stream."""
        return False

    @property
    def stream_options(self) -> StreamOptions | None:
        return None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """Body of /v1/embeddings."""

    input: str | Annotated[list[str | TokenId | TokenIds], Meta(min_length=1)]
    """text or token ids, or a list of either"""
    dimensions: Annotated[int, Meta(ge=1, le=_MAX_INT)] | None = None
    """the first so many numbers of each vector, normalised; for models that were trained for it (Matryoshka)"""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: the vector's bytes as 32-bit floats, little-endian"""
    normalize: bool | None = None
    """vLLM's: false leaves vectors as they are; left out: their length is 1"""
    add_special_tokens: bool | None = None
    """vLLM's: add the tokenizer's special tokens; left out: true"""


class Document(Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(PoolingFields, kw_only=True):
    """Body of /v1/rerank."""

    query: str
    """what the documents should answer"""
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MOST_INPUTS)]
    """texts, or objects with a text"""
    top_n: Annotated[int, Meta(ge=1, le=_MAX_INT)] | None = None
    """how many of the best to return; left out: all"""
    return_documents: bool | None = None
    """false leaves the documents out of the response"""
    instruction: Annotated[str, Meta(max_length=4096)] | None = None
    """ours: the task, for models that judge by yes and no"""


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of /v1/score."""

    text_1: str | Texts
    """one text for all of text_2, or as many as those"""
    text_2: str | Texts
    """the texts that are compared with text_1"""
    instruction: Annotated[str, Meta(max_length=4096)] | None = None
    """ours: the task, for models that judge by yes and no"""
