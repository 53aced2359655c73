# SPDX-License-Identifier: Apache-2.0
"""Tokenizes prompts, with the text of each token and its offset."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from vllm.capture_dataset.survey import Entry
from vllm.v1.capture.errors import fail

TOKENIZED_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of a request's tokens, one entry per token."""

    tokens: list[str]
    offsets: list[int | None]
    """Number of characters before the token in the text of prompt and answer."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt."""

    entry: Entry
    token_ids: list[int]
    text: TokenText
    length: int
    """Number of characters of the whole prompt."""


class Tokens:
    """Tokenizes prompts as the server does, and decodes single tokens."""

    def __init__(self, tokenizer: Any, chat: bool, truncate: int | None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._truncate = truncate
        self._pieces: dict[int, str] = {}

    def digest(self) -> str:
        """SHA-256 of the vocabulary and the chat template."""
        template = getattr(self._tokenizer, "chat_template", None)
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        content = json.dumps([vocabulary, template], default=str)
        return hashlib.sha256(content.encode()).hexdigest()

    def prompts(self, entries: Iterable[Entry]) -> Iterator[Prompt]:
        """Yield the prompts of `entries`, tokenized some hundred at a time."""
        remaining = iter(entries)
        while block := list(islice(remaining, TOKENIZED_AT_ONCE)):
            yield from self._block(block)

    def _block(self, entries: Sequence[Entry]) -> Iterator[Prompt]:
        texts = [self._text(entry) for entry in entries]
        for special in (True, False):
            # Chat templates add special tokens themselves.
            chosen = [
                number
                for number, (_, templated) in enumerate(texts)
                if not isinstance(texts[number][0], list) and templated is not special
            ]
            if chosen:
                encoded = self._encode([str(texts[i][0]) for i in chosen], special)
                for number, prompt in zip(chosen, encoded):
                    texts[number] = (prompt, texts[number][1])
        for entry, (found, _) in zip(entries, texts):
            ids, text, length = found if isinstance(found, tuple) else self._ids(found)
            cut = slice(self._truncate)
            if not ids:
                raise fail(
                    f"source: {entry.where}: the prompt has no tokens",
                    "source",
                    entry.prompt,
                )
            text = TokenText(text.tokens[cut], text.offsets[cut])
            yield Prompt(entry, ids[cut], text, length)

    def _text(self, entry: Entry) -> tuple[Any, bool]:
        """The prompt as text or token ids, and whether a template produced it."""
        prompt = entry.prompt
        if isinstance(prompt, list) and isinstance(prompt[0], int):
            return prompt, False
        if isinstance(prompt, str):
            if not self._chat:
                return prompt, False
            prompt = [{"role": "user", "content": prompt}]
        try:
            return self._tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            ), True
        except Exception as error:  # A template may raise anything.
            raise fail(
                f"source: {entry.where}: the chat template cannot be applied: {error}",
                "source",
                entry.prompt,
            ) from error

    def _encode(
        self, texts: list[str], special: bool
    ) -> Iterator[tuple[list[int], TokenText, int]]:
        fast = self._tokenizer.is_fast
        encoded = self._tokenizer(
            texts, add_special_tokens=special, return_offsets_mapping=fast
        )
        for number, (text, ids) in enumerate(zip(texts, encoded["input_ids"])):
            if not fast:
                yield (
                    ids,
                    TokenText([*map(self.piece, ids)], [None] * len(ids)),
                    len(text),
                )
                continue
            spans = encoded["offset_mapping"][number]
            tokens = [
                text[start:stop] if stop > start else self.piece(token)
                for token, (start, stop) in zip(ids, spans)
            ]
            yield ids, TokenText(tokens, [start for start, _ in spans]), len(text)

    def _ids(self, ids: list[int]) -> tuple[list[int], TokenText, int]:
        tokens = list(map(self.piece, ids))
        *offsets, length = accumulate(map(len, tokens), initial=0)
        return ids, TokenText(tokens, list(offsets)), length

    def piece(self, token: int) -> str:
        """The text of a token on its own; parts of a character are U+FFFD."""
        found = self._pieces.get(token)
        if found is None:
            found = self._pieces[token] = self._tokenizer.decode([token])
        return found

    def continued(self, prompt: Prompt, generated: Sequence[int]) -> TokenText:
        """The text of a prompt's tokens and of the generated ones."""
        if not generated:
            return prompt.text
        _, tail, _ = self._ids(list(generated))
        known = prompt.text.offsets[-1] is not None
        offsets = [
            prompt.length + offset if known and offset is not None else None
            for offset in tail.offsets
        ]
        return TokenText(
            prompt.text.tokens + tail.tokens, prompt.text.offsets + offsets
        )
