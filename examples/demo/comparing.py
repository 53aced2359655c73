# SPDX-License-Identifier: Apache-2.0
"""Compares captured rows with the hidden states of HF transformers.

Legend: R rows (tokens), H width of the stream.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

Rows = dict[tuple[int, str], torch.Tensor]
"""Rows `[R, H]` by layer and hook point."""


@dataclass(frozen=True, slots=True)
class Line:
    """One stream of rows: what was captured, and its deviation from the reference."""

    layer: int
    point: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    """Mean norm of a row."""
    cosine: float
    """Smallest cosine between a row and the reference's row."""
    error: float
    """Norm of the difference over norm of the reference, all rows together."""


def load_reference(folder: Path) -> PreTrainedModel:
    """Load the model in float32, so that the reference itself is exact."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32
    )
    return model.eval()


@torch.no_grad()
def hidden_states(model: PreTrainedModel, token_ids: list[int]) -> Rows:
    """The stream at the three points of every block of a Llama-shaped model.

    `pre_attn` and `post_block` are `hidden_states[L]` and `hidden_states[L + 1]`, but
    the last of those has passed the final norm; so hooks read them at the blocks.
    `post_attn` is the input of a block's second norm.
    """
    rows: Rows = {}
    handles = []
    for index, block in enumerate(model.model.layers):
        handles += [
            block.register_forward_pre_hook(_keep(rows, (index, "pre_attn"))),
            block.post_attention_layernorm.register_forward_pre_hook(
                _keep(rows, (index, "post_attn"))
            ),
            block.register_forward_hook(_keep(rows, (index, "post_block"))),
        ]
    try:
        model(torch.tensor([token_ids]))
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _keep(rows: Rows, key: tuple[int, str]):  # type: ignore[no-untyped-def]
    def hook(_module: torch.nn.Module, *seen: object) -> None:
        value = seen[-1]  # a block's output; its inputs where there is no output yet
        tensor = value[0] if isinstance(value, tuple) else value
        assert isinstance(tensor, torch.Tensor)
        rows[key] = tensor.flatten(0, -2).clone()

    return hook


def compare(captured: Rows, reference: Rows) -> list[Line]:
    """Compare each captured stream, in the order of the model.

    Raises:
        ValueError: the number of rows differs from the reference's.
    """
    points = ("pre_attn", "post_attn", "post_block")
    order = sorted(captured, key=lambda key: (key[0], points.index(key[1])))
    return [_compare_one(key, captured[key], reference[key]) for key in order]


def _compare_one(key: tuple[int, str], got: torch.Tensor, want: torch.Tensor) -> Line:
    if got.shape != want.shape:
        raise ValueError(
            f"layer {key[0]} {key[1]}: captured {tuple(got.shape)}, the reference has "
            f"{tuple(want.shape)}"
        )
    rows = got.float()
    cosine = torch.nn.functional.cosine_similarity(rows, want, dim=-1)
    return Line(
        layer=key[0],
        point=key[1],
        shape=tuple(got.shape),
        dtype=str(got.dtype).removeprefix("torch."),
        norm=rows.norm(dim=-1).mean().item(),
        cosine=cosine.min().item(),
        error=((rows - want).norm() / want.norm()).item(),
    )
