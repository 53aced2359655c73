# SPDX-License-Identifier: Apache-2.0
"""Parsed responses and chunks of streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from typing import Any

from clearbox_client import html
from clearbox_client.errors import InputError
from clearbox_client.readouts import Readout, readouts_of
from clearbox_client.rows import RowSet


@dataclass(frozen=True)
class CaptureOutcome:
    """The result of a request's capture at one consumer."""

    status: str
    """`ok`, `partial_error`, `error`, `pending` or `not_requested`."""
    error: str | None
    payload: Any
    """The payload in the server's form; `Reply.rows` has the rows of `inline`."""


@dataclass(frozen=True)
class Reply:
    """A complete response."""

    text: str
    """Text of the first choice; `texts` has all."""
    texts: list[str]
    finish_reason: str | None
    stop_reason: Any
    rows: RowSet
    """Rows of the first choice; `rows_of` has those of all choices."""
    rows_of: list[RowSet]
    captures: dict[str, CaptureOutcome]
    readouts: dict[str, Readout]
    """Readouts of the first choice, by name; `readouts_of` has those of all choices."""
    readouts_of: list[dict[str, Readout]]
    steering: dict[str, Any] | None
    """The steering receipt, if `steering_receipt` was set."""
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None
    tokens: list[str] | None
    """Texts of prompt and generated tokens, if `tokens=True` was passed."""
    raw: Mapping[str, Any] = field(repr=False)
    """The response's JSON; rows are bytes or base64, as the server sent them."""

    @classmethod
    def of(
        cls, document: Mapping[str, Any], tokens: Sequence[str] | None = None
    ) -> "Reply":
        """Parse a response's JSON."""
        choices = document["choices"]
        first = choices[0]
        captures = captures_of(document)
        by_choice = rows_by_choice(captures, tokens)
        rows = [by_choice.get(index, RowSet({})) for index in range(len(choices))]
        texts = [text_of(choice) for choice in choices]
        readouts = all_readouts(document, len(choices))
        prompt = first.get("prompt_token_ids") or document.get("prompt_token_ids")
        return cls(
            text=texts[0],
            texts=texts,
            finish_reason=first.get("finish_reason"),
            stop_reason=first.get("stop_reason"),
            rows=rows[0],
            rows_of=rows,
            captures=captures,
            readouts=readouts[0],
            readouts_of=readouts,
            steering=document.get("steering"),
            prompt_token_ids=prompt,
            token_ids=first.get("token_ids"),
            tokens=None if tokens is None else list(tokens),
            raw=document,
        )

    def _repr_html_(self) -> str:
        text = f"<p>{escape(self.text)}</p>"
        parts = [self.rows._repr_html_()] if self.rows else []
        if self.tokens is not None and self.readouts:
            shown = html.readout_parts(self.tokens, self.readouts, {})
            parts.append(html.frame(shown))
        else:
            parts += [readout._repr_html_() for readout in self.readouts.values()]
        return text + "".join(parts)

    def save_html(
        self,
        path: str | PathLike[str],
        token_texts: Callable[[list[int]], list[str]] | None = None,
    ) -> None:
        """Write one HTML file of the text and its readouts, which loads nothing.

        Args:
            path: the file.
            token_texts: gives the texts of token ids, `Client.token_texts`; without
                it a lens shows ids.

        Raises:
            InputError: the reply was not asked for with `tokens=True`.

        """
        if self.tokens is None:
            raise InputError(
                "save_html needs the texts of tokens; ask with tokens=True",
                "tokens",
                None,
            )
        html.save(path, self.tokens, self.readouts, token_texts)


@dataclass(frozen=True)
class Chunk:
    """A chunk of a stream: its text, rows and readouts."""

    text: str
    index: int
    """Index of the choice."""
    finish_reason: str | None
    rows: RowSet
    """Rows of this choice; `rows_of` has those of all choices that the chunk brings."""
    rows_of: dict[int, RowSet]
    """Rows by the index of their choice, which may be another than the chunk's."""
    captures: dict[str, CaptureOutcome]
    readouts: dict[str, Readout]
    """Readouts that are new, by name; the last chunk has all.

    They are those of the tokens before: a token is computed after the chunk that brings
    it. `paired` joins texts and values."""
    raw: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Chunk":
        """Parse a chunk's JSON."""
        choice = (document.get("choices") or [{}])[0]
        captures, index = captures_of(document), choice.get("index", 0)
        rows = rows_by_choice(captures)
        return cls(
            text=text_of(choice),
            index=index,
            finish_reason=choice.get("finish_reason"),
            rows=rows.get(index, RowSet({})),
            rows_of=rows,
            captures=captures,
            readouts=readouts_of(document.get("readouts")),
            raw=document,
        )


def all_readouts(document: Mapping[str, Any], count: int) -> list[dict[str, Readout]]:
    """The readouts of each choice."""
    readouts = document.get("readouts") or {}
    if count == 1:
        return [readouts_of(readouts)]
    return [readouts_of(readouts.get(str(index))) for index in range(count)]


def captures_of(document: Mapping[str, Any]) -> dict[str, CaptureOutcome]:
    """The capture results by consumer."""
    return {
        name: CaptureOutcome(one["status"], one.get("error"), one.get("payload"))
        for name, one in (document.get("capture_results") or {}).items()
    }


def rows_by_choice(
    captures: Mapping[str, CaptureOutcome], tokens: Sequence[str] | None = None
) -> dict[int, RowSet]:
    """The rows by the index of their choice; `tokens` are those of a single one."""
    payload = captures["inline"].payload if "inline" in captures else None
    if not isinstance(payload, Mapping):
        return {0: RowSet.of(payload or (), tokens)}
    return {int(i): RowSet.of(rows or (), None) for i, rows in payload.items()}


def text_of(choice: Mapping[str, Any]) -> str:
    """The text of a choice, or of a part of it, of a completion or chat."""
    part = choice.get("message") or choice.get("delta") or choice
    text = part.get("text") or part.get("content") or ""
    if not isinstance(text, str):
        raise TypeError(f"a choice's text is {type(text).__name__}")
    return text
