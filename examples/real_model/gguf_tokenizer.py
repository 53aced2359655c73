# SPDX-License-Identifier: Apache-2.0
"""Builds a Transformers tokenizer from the metadata of a GGUF file.

GGUF contains the vocabulary, the merges and the chat template, and names the way in
which texts are split before the merges. `smollm` means: each digit is one piece, then
the pattern of GPT-2's byte-level tokenizer applies.
"""

from collections.abc import Callable
from typing import Any

from gguf import Keys, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPLITTING = "smollm"


def tokenizer_of(
    field: Callable[[str], Any], max_length: int
) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file.

    Args:
        field: returns the content of a metadata field by its key.
        max_length: the model's context length in tokens.

    Raises:
        ValueError: the file's tokenizer is of another kind.

    """
    kind = field(Keys.Tokenizer.MODEL), field(Keys.Tokenizer.PRE)
    if kind != ("gpt2", SPLITTING):
        raise ValueError(
            f"unknown tokenizer {kind}; only ('gpt2', {SPLITTING!r}) is supported"
        )
    tokens: list[str] = field(Keys.Tokenizer.LIST)
    merges = [tuple(pair.split(" ")) for pair in field(Keys.Tokenizer.MERGES)]
    bare = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, field(Keys.Tokenizer.TOKEN_TYPE))
            if kind == TokenType.CONTROL
        ]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        bos_token=tokens[field(Keys.Tokenizer.BOS_ID)],
        eos_token=tokens[field(Keys.Tokenizer.EOS_ID)],
        pad_token=tokens[field(Keys.Tokenizer.PAD_ID)],
        unk_token=tokens[field(Keys.Tokenizer.UNK_ID)],
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    whole.chat_template = field(Keys.Tokenizer.CHAT_TEMPLATE)
    return whole
