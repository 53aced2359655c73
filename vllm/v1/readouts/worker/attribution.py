# SPDX-License-Identifier: Apache-2.0
"""What each part of the stream adds to the logits of tokens, in float32.

With the scale of the final norm fixed, a logit is a linear function of the last row of
the stream, and so a sum over what was added to it: the embedding, attention and the MLP
of each layer. Without this a user captures the stream at all points, 96 rows or 786 kB
of a token of an 8B model, and multiplies by the unembedding: here 66 numbers come back
for each token of interest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.readouts.worker.head import Head, trial_rows
from vllm.v1.readouts.worker.head_parts import Form, HeadParts, forms_of, likeliest
from vllm.v1.readouts.worker.jobs import Arrays, Job
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.readout_plan import ADDED, ATTN_REST, Readout
from vllm.v1.residual.tap import Tap

TOLERANCE = 0.02
"""Largest relative difference between the model and its linear form, in 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Directions:
    """How logits of t tokens depend on a row that the final norm has scaled."""

    rows: torch.Tensor  # [t, hidden_size] float32, with the norm's weights
    normed: torch.Tensor  # [t, hidden_size] float32, for what the norm returns
    bias: torch.Tensor  # [t] float32
    of_heads: dict[Any, torch.Tensor] = field(default_factory=dict)
    """What `HeadParts` keeps for these tokens."""


class Attribution:
    """The linear form of a model's final norm and head. Engine thread only."""

    def __init__(
        self,
        head: Head,
        model: nn.Module,
        width: int,
        dtype: torch.dtype,
        heads: HeadParts,
    ) -> None:
        """Find the linear form, and compare it with the model.

        Args:
            head: of the model; without one the form is not needed.
            model: the loaded model.
            width: of the stream.
            dtype: of the stream.
            heads: the linear forms of attention.

        """
        self._head = head
        self._heads = heads
        self._form: Form
        """That of the final norm."""
        self._scale = 1.0
        self.refusal = head.refusal
        """Why there is none; empty if there is."""
        if head.refusal:
            return
        if head.has_adapters:
            self.refusal = "with --enable-lora the head depends on the request"
            return
        processors = [
            one for one in model.modules() if isinstance(one, LogitsProcessor)
        ]
        if len(processors) != 1:
            self.refusal = "the model has several heads"
            return
        with torch.inference_mode():
            try:
                self._find(width, dtype)
                self._check(processors[0], width, dtype)
            except ValueError as error:
                self.refusal = str(error)

    def _find(self, width: int, dtype: torch.dtype) -> None:
        """Find the linear form of the final norm."""
        rows = trial_rows(4, width, dtype, self._head.unembedding([0])[0].device)
        normed = self._head.normed(rows).float()
        forms = forms_of(self._head.norm)
        self._form, error = likeliest(forms, rows.float(), normed)
        if error >= TOLERANCE:
            raise ValueError(
                f"the final norm {type(self._head.norm).__name__} is not linear at a "
                "fixed scale"
            )

    def _check(self, processor: Any, width: int, dtype: torch.dtype) -> None:
        """Compare logits of the form with those of the model."""
        self._scale = float(processor.scale) / self._head.divisor
        tokens = (0, 1, 2, 3)
        directions = self.directions(tokens)
        rows = trial_rows(1, width, dtype, directions.rows.device)
        logits = self._head.logits(rows)
        if logits is None:  # Another rank compares.
            return
        expected = logits[0, list(tokens)].float()
        found = self._logits(rows, directions)[0] / processor.scale
        if cap := processor.soft_cap:
            found = (found / cap).tanh() * cap
        difference = (found * processor.scale - expected).abs().max()
        if difference > TOLERANCE * expected.abs().max().clamp(min=1e-3):
            raise ValueError("the head is not a product with its rows and a scale")

    def directions(self, tokens: Sequence[int]) -> Directions:
        """The form for some tokens. A collective under tensor parallelism.

        Raises:
            ValueError: the unembedding has no floating-point rows.

        """
        rows, bias, _ = self._head.unembedding(list(tokens))
        both = torch.cat((rows.float(), bias[:, None].float()), dim=1)
        both = get_tp_group().all_reduce(both)
        scaled = both[:, :-1] * self._scale
        rows = self._form.before(scaled)
        bias = both[:, -1] * self._scale * self._head.divisor
        return Directions(rows, scaled, bias)

    def _logits(self, rows: torch.Tensor, directions: Directions) -> torch.Tensor:
        """Logits `[n, t]` of rows `[n, hidden_size]`, before any soft cap."""
        normed = self._head.normed(rows).float()
        return normed @ directions.normed.T + directions.bias

    def compute(
        self,
        job: Job,
        rows: torch.Tensor,
        directions: Directions,
        errors: dict[int, str],
    ) -> Arrays:
        """What each component adds to the logits, and the rest.

        Args:
            job: of readouts of this kind with these tokens.
            rows: `[R, hidden_size]`.
            directions: of the tokens.
            errors: extended by the errors of entries, by index.

        Returns:
            For entry i `i.logits` `[count, components, t]` float32. They sum to the
            logits before any soft cap.

        """
        found: Arrays = {}
        for number, entry in enumerate(job.entries):
            own = rows[entry.first : entry.first + entry.num_rows]
            own = own.view(entry.count, -1, own.shape[-1])
            count = len(entry.readout.staged) - len(entry.readout.inside)
            own, inside = own[:, :count], own[:, count:]
            last = own[:, -1]
            normed = self._head.normed(last).float()
            ratio = self._form.scale(last.float(), normed)
            parts = own.float() @ directions.rows.T * ratio[:, None]
            try:
                heads = self._of_heads(entry.readout, inside, directions)
            except ValueError as error:  # Perhaps because of what its request changes.
                errors[number] = described(error)
                continue
            heads = {layer: one * ratio[:, None] for layer, one in heads.items()}
            added = _differences(entry.readout, parts, heads)
            rest = self._logits(last, directions) - added.sum(dim=1)
            found[f"{number}.logits"] = torch.cat((added, rest[:, None]), dim=1)
        return found

    def _of_heads(
        self, readout: Readout, rows: torch.Tensor, directions: Directions
    ) -> dict[int, torch.Tensor]:
        """By layer `[count, heads, t]`; `rows` are those of `readout.inside`."""
        found: dict[int, torch.Tensor] = {}
        layers = [layer for layer, point in readout.inside if point == "z"]
        at = 0
        for layer in layers:
            width = self._heads.width(layer)
            added, at = rows[:, at], at + 1
            each = -(-width // rows.shape[-1])
            z, at = rows[:, at : at + each].flatten(1)[:, :width], at + each
            found[layer] = self._heads.parts(
                layer, readout.heads, z, added, directions.rows, directions.of_heads
            )
        return found


def _differences(
    readout: Readout, parts: torch.Tensor, heads: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """`[count, components - 1, t]` of `[count, taps, t]`, which staged points have.

    `heads` has the parts of heads, by layer.
    """
    place = {tap: number for number, tap in enumerate(readout.staged)}
    columns: list[torch.Tensor] = []
    for layer, name in readout.taps[:-1]:
        if name not in ADDED:
            continue
        if name == ATTN_REST:
            columns += heads[layer].unbind(1)
        points: tuple[Tap, ...] = tuple((layer, point) for point in ADDED[name])
        columns.append(parts[:, place[points[-1]]])
        if len(points) > 1:
            columns[-1] = columns[-1] - parts[:, place[points[0]]]
        if name == ATTN_REST:
            columns[-1] = columns[-1] - heads[layer].sum(1)
    return torch.stack(columns, dim=1)
