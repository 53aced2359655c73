# SPDX-License-Identifier: Apache-2.0
"""Batches documents of similar length, one document per row.

Most documents are short: with several of them in one row, half of a CPU's time would go
to attention between documents, which is masked.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from generate_text import EOS, documents
from tokenizers import Tokenizer

IGNORED = -100
"""The label that `cross_entropy` ignores."""
POOL = 512
"""Number of documents that are sorted by length together."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One training step's input, padded on the right; `T` is its longest document."""

    input_ids: torch.Tensor  # [rows, T], int64
    labels: torch.Tensor  # [rows, T], int64, already shifted by one


def batches(
    tokenizer: Tokenizer, tokens: int, length: int, seed: int
) -> Iterator[Batch]:
    """Yield endless batches of fresh text, of at most `tokens` tokens with padding.

    Documents are cut at `length` tokens. A batch holds at least one document.
    """
    rng = random.Random(seed)
    texts = (document.text + EOS for document in documents(seed))
    while True:
        pool = [tokenizer.encode(text).ids[:length] for text in islice(texts, POOL)]
        groups = _groups(sorted(pool, key=len), tokens)
        rng.shuffle(groups)
        yield from map(_batch, groups)


def _groups(pool: list[list[int]], tokens: int) -> list[list[list[int]]]:
    """Cut documents, shortest first, into groups that fit `tokens` when padded."""
    groups: list[list[list[int]]] = [[]]
    for document in pool:
        if groups[-1] and len(document) * (len(groups[-1]) + 1) > tokens:
            groups.append([])
        groups[-1].append(document)
    return groups


def _batch(group: list[list[int]]) -> Batch:
    """Pad a group; padding is neither attended to nor trained on."""
    longest = max(map(len, group))
    ids = [row + [0] * (longest - len(row)) for row in group]
    labels = [row[1:] + [IGNORED] * (longest - len(row) + 1) for row in group]
    return Batch(torch.tensor(ids), torch.tensor(labels))
