# SPDX-License-Identifier: Apache-2.0
"""The rows that a probe reads, as captures, and the attributes of outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.results import RowsByTap
from vllm.v1.residual.layer_selectors import parse_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PROMPT = "probe_prompt"
GENERATED = "probe_generated"
"""The second instance of `inline`: prompt rows and generated rows are selected
separately."""

CONSUMERS = [
    {"name": "inline", "instance_name": PROMPT},
    {"name": "inline", "instance_name": GENERATED},
]

HOOK = "post_block"
ROWS_DTYPE = "bfloat16"

Layers = Sequence[int] | int | str
Rows = dict[int, torch.Tensor]
"""Rows `[rows, hidden_size]` by layer, in the probe's dtype, on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """The arguments of vllm-probe-hook's constructors that vLLM's do not have."""

    layers: Layers
    """0-based decoder layers whose output is read; also as text such as "0,4-7", or
    "all"."""
    include_prefill: bool = False
    """Whether outputs carry `prefill_hidden_states`."""
    include_decode: bool = True
    """Whether outputs carry `hidden_states`, a row per output token."""
    last_prefill_token: bool = False
    """Whether `prefill_hidden_states` holds the last prompt token's row only."""
    last_decode_token: bool = False
    """Whether `hidden_states` holds the last output token's row only."""
    dtype: str | torch.dtype = ROWS_DTYPE
    """The dtype of the returned rows, or "auto" for the model's; `model_dtype` is the
    model's."""

    def __post_init__(self) -> None:
        if self.dtype != "auto" and not isinstance(self._dtype(), torch.dtype):
            raise CaptureValidationError(
                f"dtype={self.dtype!r}: torch has no such dtype; use for example "
                '"bfloat16", "float32", or "auto" for the model\'s',
                parameter="dtype",
                value=self.dtype,
            )
        if not isinstance(self.layers, int) and len(self.layers) == 0:
            raise CaptureValidationError(
                "layers is empty: name one layer or more, or give 'all'",
                parameter="layers",
                value=self.layers,
            )
        if not (self.include_prefill or self.include_decode):
            raise CaptureValidationError(
                "include_prefill and include_decode are both False: nothing would be "
                "read; set one of them, or use vllm.LLM",
                parameter="include_decode",
                value=False,
            )

    def of_model(self, config: "VllmConfig") -> "ProbeOptions":
        """These options with the layers as a list, for an engine that has started.

        Raises:
            CaptureValidationError: a layer is not one of the model's.

        """
        points = config.capture_config.hook_points or {}
        having = sorted(layer for layer, names in points.items() if HOOK in names)
        layers = parse_layers(
            self.layers, having, max(points, default=-1) + 1, "layers", fail
        )
        return replace(self, layers=layers)

    def capture(self) -> dict[str, Any]:
        """`SamplingParams.capture` for these rows.

        The row that predicts the first output token is the last prompt token's, so that
        one is captured for `hidden_states` too.
        """
        hooks = {HOOK: self.layers}
        whole = self.include_prefill and not self.last_prefill_token
        prompt = "all_prompt" if whole else "last_prompt"
        captures = {PROMPT: {"hooks": hooks, "positions": prompt}}
        if self.include_decode:
            captures[GENERATED] = {"hooks": hooks, "positions": "all_generated"}
        return captures

    def decode_rows(self, prompt: RowsByTap, generated: RowsByTap) -> Rows:
        """Rows at positions P-1 to P+N-2: row i predicts output token i.

        With `last_decode_token`, the last of them only.
        """
        rows = {
            layer: torch.cat([last[-1:], generated.get((layer, hook), last[:0])])
            for (layer, hook), last in sorted(prompt.items())
        }
        if self.last_decode_token:
            rows = {layer: states[-1:] for layer, states in rows.items()}
        return self._converted(rows)

    def prefill_rows(self, prompt: RowsByTap) -> Rows:
        """Rows of all prompt tokens, or with `last_prefill_token` the last one's."""
        return self._converted({tap[0]: rows for tap, rows in sorted(prompt.items())})

    def _converted(self, rows: Rows) -> Rows:
        dtype = self._dtype()
        return {layer: states.to(dtype) for layer, states in rows.items()}

    def _dtype(self) -> torch.dtype | None:
        """The dtype to convert to; None if rows stay as they are."""
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        return getattr(torch, str(self.dtype), None)


OPTIONS = frozenset(one.name for one in fields(ProbeOptions)) - {"layers"}


def with_capture(params: SamplingParams, options: ProbeOptions) -> SamplingParams:
    """A copy of `params` that also captures the rows that the probe reads.

    Raises:
        CaptureValidationError: `params` asks for several samples.

    """
    if params.n != 1:
        raise CaptureValidationError(
            f"n={params.n}: hidden_states are those of one sample; send the prompt "
            f"{params.n} times with n=1",
            parameter="n",
            value=params.n,
        )
    params = params.clone()
    params.capture = {**(params.capture or {}), **options.capture()}
    return params


def attach(output: RequestOutput, options: ProbeOptions) -> RequestOutput:
    """Set the attributes of vllm-probe-hook on an output; returns the same output.

    Until the last output they hold the rows that are available so far.

    Raises:
        RuntimeError: a finished request's rows could not be captured.

    """
    results = output.capture_results or {}
    payloads = {}
    for name in options.capture():
        result = results.get(name)
        if output.finished and (result is None or result.status != "ok"):
            raise RuntimeError(
                f"hidden states of request {output.request_id} are not complete: "
                f"{'there is no result' if result is None else result.error}"
            )
        payload = result.payload if result else None
        payloads[name] = payload if isinstance(payload, RowsByTap) else RowsByTap()
    prompt = payloads[PROMPT]
    if options.include_decode:
        rows = options.decode_rows(prompt, payloads[GENERATED])
        _set(output, "hidden_states", "hidden", rows)
    if options.include_prefill:
        _set(
            output,
            "prefill_hidden_states",
            "prefill_hidden",
            options.prefill_rows(prompt),
        )
    return output


def _set(output: RequestOutput, name: str, alias: str, rows: Rows) -> None:
    """Set both names that vllm-probe-hook uses; upstream's class declares neither."""
    setattr(output, name, rows)
    setattr(output, alias, rows)
