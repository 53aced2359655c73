# SPDX-License-Identifier: Apache-2.0
"""Results of readouts as users get them, and of two outputs of a stream together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vllm.logger import init_logger
from vllm.v1.residual.readout_plan import Array
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from clearbox_client.readouts import Readout as ClientReadout

logger = init_logger(__name__)

FULL_AXES = 3
"""Dimensions of full attention patterns, `[heads, n, context]`."""


@dataclass(slots=True)
class ReadoutResult:
    """The result of one readout, `output.readouts[name]`.

    The contents of `arrays` depend on the kind. n is the number of tokens, in the order
    of `positions`, and taps the length of `taps`:

    - `rows`: `rows` `[n, taps, hidden_size]`, or `[taps, hidden_size]` if reduced;
    - `probe`: `values` `[n, k]`;
    - `lens`: `token_ids` and `logprobs` `[n, taps, top_k]`, and `token_logprobs`
      `[n, taps, tokens]` of the requested tokens;
    - `sae`: `features` and `activations` `[n, top_k]`, where features are -1 if fewer
      than `top_k` are active; or `activations` `[n, features]` of the requested ones;
    - `norm`: `norm` and `cosine` `[n, taps]`;
    - `attention`: `weights` and `keys` (positions; -1 if there are fewer keys)
      `[n, taps, heads, top_k]`, or `weights` of the requested keys; of a full pattern
      `weights` `[heads, n, context]`, where the context ends with the last token;
    - `attribution`: `logits` `[n, taps, tokens]`; the taps are components, such as
      `(3, "attn_add")`;
    - `custom`: `values` `[n, ...]`.

    Token ids, features and keys are int32, other values float32; rows have the model's
    dtype, or float32 if it is bfloat16 or if they are reduced. Log-probabilities are
    natural.
    """

    kind: str
    positions: list[int] = field(default_factory=list)
    """Token positions of the arrays, ascending."""
    taps: tuple[Tap, ...] = ()
    """`(layer, hook point)`, in the order of the arrays."""
    arrays: dict[str, Array] = field(default_factory=dict)
    error: str | None = None
    """Why the result is missing or incomplete; None if it is complete."""
    num_prompt_tokens: int | None = None
    """In the outputs of a stream: position p is that of generated token
    `p - num_prompt_tokens`. A token is computed after the output that brings it, so its
    values come with the next one."""
    note: str | None = None
    """Set if the request itself changes the stream at a place that is read here: the
    values are those before the change."""

    def __getitem__(self, name: str) -> Array:
        if name not in self.arrays:
            raise KeyError(f"{name!r} is not in {self!r}")
        return self.arrays[name]

    def _repr_html_(self) -> str | None:
        """For notebooks, as a client shows it; None without `clearbox-client`."""
        try:
            return self.for_client()._repr_html_()
        except ImportError:
            return None

    def for_client(self) -> "ClientReadout":
        """The same result as a client has it.

        Raises:
            ImportError: `clearbox-client` is not installed.

        """
        from clearbox_client.readouts import Readout as ClientReadout

        taps = list(self.taps)
        return ClientReadout(self.kind, self.positions, taps, self.arrays, self.error)

    def __repr__(self) -> str:
        parts = [
            self.kind,
            f"{len(self.positions)} positions",
            f"{len(self.taps)} taps",
        ]
        parts += [f"{name} {list(one.shape)}" for name, one in self.arrays.items()]
        told = {"error": self.error, "note": self.note}
        parts += [f"{name}={text!r}" for name, text in told.items() if text]
        return f"ReadoutResult({', '.join(parts)})"


def concatenated(arrays: Sequence[Array], axis: int = 0) -> Array:
    """The arrays, one after the other; missing keys of full patterns have weight 0."""
    context = arrays[-1].shape[-1]
    if any(one.shape[-1] != context for one in arrays):
        most = max(one.shape[-1] for one in arrays)
        sides = [(0, 0)] * (arrays[0].ndim - 1)
        arrays = [np.pad(a, [*sides, (0, most - a.shape[-1])]) for a in arrays]
    return np.concatenate(arrays, axis)


def merge_results(
    first: Mapping[str, ReadoutResult] | None,
    second: Mapping[str, ReadoutResult] | None,
    second_is_whole: bool,
) -> dict[str, ReadoutResult] | None:
    """Merge the results of two consecutive outputs of a stream.

    Args:
        first: results of the earlier output.
        second: results of the later output.
        second_is_whole: whether the later one is the last, which has all results.

    """
    if second_is_whole or not first or not second:
        found = second or (None if second_is_whole else first)
        return None if found is None else dict(found)
    merged = dict(first)
    for name, result in second.items():
        merged[name] = _followed(first[name], result) if name in first else result
    return merged


def _followed(first: ReadoutResult, second: ReadoutResult) -> ReadoutResult:
    is_full = first.kind == "attention" and first["weights"].ndim == FULL_AXES
    arrays = {
        name: concatenated([first.arrays[name], one], axis=int(is_full))
        if name in first.arrays
        else one
        for name, one in second.arrays.items()
    }
    return ReadoutResult(
        first.kind,
        first.positions + second.positions,
        first.taps,
        {**first.arrays, **arrays},
        second.error or first.error,
        second.num_prompt_tokens,
        second.note,
    )
