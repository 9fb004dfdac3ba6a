"""Training of a byte-level BPE tokenizer: any text encodes, and decodes to itself.

The result has an end of text, chat tokens and a small chat template, so that a model trained with it can be tuned
later.
"""

from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers

from armillary.errors import BadInput
from armillary.model.text.tokenizer import Tokenizer

END_OF_TEXT, PAD, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, PAD, TURN_START, TURN_END)
SMALLEST = 256 + len(SPECIAL)
LARGEST = 2**20

# How GPT-4's cl100k_base splits text into words (the pattern is published in OpenAI's tiktoken), except that numbers
# are split after two digits rather than three: in a small vocabulary a thousand triples would crowd out words.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer of at most `vocab` ids (fewer where the text is small); the same texts give the same tokenizer."""
    if vocab < SMALLEST:
        raise BadInput(f"a vocabulary of {vocab} cannot hold 256 bytes and {len(SPECIAL)} special tokens; try 512")
    if vocab > LARGEST:
        raise BadInput(f"a vocabulary of {vocab:,} is more than the {LARGEST:,} we train; try 131072")
    backend = tokenizers.Tokenizer(models.BPE())
    splitter = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([splitter, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # every text starts with the end of the one before, so that the first word of a document is learned too
    ids = {text: number for number, text in enumerate(SPECIAL)}
    backend.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A",
        pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B",
        special_tokens=[(END_OF_TEXT, ids[END_OF_TEXT])],
    )
    return Tokenizer(
        backend=backend,
        special_tokens={"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "pad_token": PAD},
        eos_ids=(ids[END_OF_TEXT], ids[TURN_END]),
        templates={"default": CHAT_TEMPLATE},
        config={"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False},
    )
