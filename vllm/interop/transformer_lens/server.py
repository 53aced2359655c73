# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' `Driver` on a server, by means of `clearbox_client`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.interop.transformer_lens.driver import (
    Answer,
    Asked,
    ServedDriver,
    Vectors,
    filled,
)
from vllm.interop.transformer_lens.interventions import names_of
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from clearbox_client import Client, Reply

FLAGS = (
    "--capture-consumers inline --enable-steering --max-logprobs -1 "
    "--logprobs-mode raw_logits"
)
"""Required flags of `vllm serve`."""

CONCURRENT = 16
"""Maximum number of prompts in flight."""


class ServerDriver(ServedDriver):
    """TransformerLens' `Driver` on a server.

    Args:
        client: of a server that was started with `FLAGS`.
        bridge_config: TransformerLens' configuration of the model.
        architecture: the Hugging Face name of the model's class.
        tokenizer: the model's.

    Raises:
        ValueError: the server lacks a feature that the driver needs; the message has
            the remedy.
        clearbox_client.ClearboxError: the server does not answer, or refuses the key.

    """

    def __init__(
        self, client: "Client", bridge_config: Any, architecture: str, tokenizer: Any
    ) -> None:
        status = client.capture_status()
        if "inline" not in [one["name"] for one in status.get("consumers", ())]:
            raise ValueError(f"the server returns no rows: start it with {FLAGS}")
        points = {int(layer): own for layer, own in status["hook_points"].items()}
        names = names_of(points)
        super().__init__(bridge_config, architecture, tokenizer, names)
        self.client = client
        self._vocabulary = bridge_config.d_vocab
        self._check()

    def _check(self) -> None:
        """Request one token, to test that the server steers and returns logits.

        Raises:
            ValueError: the server was started without some of `FLAGS`.

        """
        from clearbox_client import ClearboxError

        layer, hook = next(iter(self._taps.values()))
        zeros = np.zeros(self.bridge_config.d_model, np.float32)
        vectors: Vectors = {hook: {layer: [{"op": "add", "vector": zeros}]}}
        asked = Asked(taps=(), vectors=vectors, max_new_tokens=1, logits=True)
        try:
            (answer,) = self._answers([[0]], asked)
        except ClearboxError as error:
            if error.status != 400:
                raise
            raise ValueError(f"start the server with {FLAGS}: {error}") from error
        assert answer.logits is not None, "logits were requested"
        if abs(float(answer.logits.logsumexp(dim=-1))) < 1e-3:
            raise ValueError(
                "the server returns log-probabilities, not logits: start it with "
                "--logprobs-mode raw_logits"
            )

    def _answers(self, prompts: list[list[int]], asked: Asked) -> list[Answer]:
        replies = self.client.complete_many(
            prompts,
            concurrency=CONCURRENT,
            progress=False,
            return_tokens_as_token_ids=True,
            **asked.fields(),
        )
        return [
            Answer(
                rows=_rows(reply, asked.taps),
                logits=_logits(reply, self._vocabulary) if asked.logits else None,
                new_tokens=reply.token_ids or (),
                raw=reply,
            )
            for reply in replies
        ]

    def _generated(
        self,
        prompts: list[list[int]],
        sampling: Mapping[str, Any],
        vectors: Vectors | None,
    ) -> list[list[int]]:
        replies = self.client.complete_many(
            prompts,
            concurrency=CONCURRENT,
            progress=False,
            steering_vectors=vectors,
            **sampling,
        )
        return [list(reply.token_ids or ()) for reply in replies]


def _rows(reply: "Reply", taps: tuple[Tap, ...]) -> dict[Tap, torch.Tensor]:
    """The rows, in the model's dtype.

    Raises:
        RuntimeError: rows are missing; the message has the server's reason.

    """
    if not taps:
        return {}
    outcome = reply.captures.get("inline")
    if outcome is None or outcome.status != "ok":
        reason = "no result came" if outcome is None else outcome.error
        raise RuntimeError(f"the rows of a prompt are not complete: {reason}")
    return {
        tap: torch.from_numpy(rows.stored).view(getattr(torch, rows.dtype))
        for tap, rows in reply.rows.items()
    }


def _logits(reply: "Reply", vocabulary: int) -> torch.Tensor:
    """Logits of every prompt position, `[tokens, vocabulary]`, float32.

    The response lists the logits that predict prompt tokens 1 to P-1 by token id, and
    those that predict the first generated token as `token_id:ID`.
    """
    choice = reply.raw["choices"][0]
    known = [
        {int(token): entry["logprob"] for token, entry in position.items()}
        for position in choice["prompt_logprobs"][1:]
    ]
    first = choice["logprobs"]["top_logprobs"][0]
    known.append({int(name.split(":")[1]): value for name, value in first.items()})
    return filled(known, vocabulary)
