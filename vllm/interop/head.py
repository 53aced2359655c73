# SPDX-License-Identifier: Apache-2.0
"""Access to a model's own head through an `LLM`: logits and unembedding rows."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vllm.interop.tensors import tensor_of
from vllm.v1.residual.engine_call import call_engine

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def decode_rows(llm: "LLM", rows: torch.Tensor) -> torch.Tensor:
    """Logits `[rows, vocabulary]` float32 of rows `[rows, hidden_size]`.

    They are computed by the engine's final norm and head.

    Args:
        llm: an engine started with `enable_readouts=True`.
        rows: rows of the stream after the last layer, or after another one.

    """
    sent = rows.detach().float().cpu().contiguous().numpy().tobytes()
    core = llm.llm_engine.engine_core
    return received(call_engine(core, "decoded_rows", sent, len(rows)))[0]


def unembedding_rows(llm: "LLM", tokens: Sequence[int]) -> torch.Tensor:
    """The unembedding's rows of tokens `[tokens, hidden_size]`, in its own dtype.

    Args:
        llm: an engine started with `enable_readouts=True`.
        tokens: token ids below the vocabulary's size.

    """
    core = llm.llm_engine.engine_core
    asked = [int(one) for one in tokens]
    return received(call_engine(core, "unembedding_rows", asked))[0]


def received(answer: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """Decode the tensors in an engine core's answer."""
    return [
        tensor_of(one["data"], getattr(torch, one["dtype"]), one["shape"])
        for one in answer
    ]
