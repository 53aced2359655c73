# SPDX-License-Identifier: Apache-2.0
"""A server that has the consumer `inline`, and runs single prompts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from clearbox_client import ClearboxError, Client, InputError, Readout, Reply, RowSet

from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.runners import (
    CaptureRunError,
    captured,
    failed,
    nothing_kept,
)
from vllm.capture_dataset.spec import ITEM_SIZES, ModelFacts, RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.results import RowsByTap
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.selectors import parse_positions
from vllm.v1.residual.spans import selected

INTEGERS = ("token_ids", "features", "keys")
"""Arrays of readouts that are int32 in an engine."""


class ServerLostError(CaptureRunError):
    """The server does not answer, or its engine has failed."""


class Server:
    """A server, to which several requests are sent at a time."""

    def __init__(
        self, url: str, tokenizer: str | None, api_key: str | None, concurrency: int
    ) -> None:
        """Connect to the server and read its model's facts.

        Raises:
            CaptureValidationError: the server does not answer, or lacks a feature.

        """
        self._client = Client(url, api_key=api_key)
        self.url = url
        self.concurrency = concurrency
        with self._understood():
            model = self._client.models()[0]
            status = self._client.capture_status()
            self._check_consumer(status)
            root = str(model.get("root") or model["id"])
        self.tokenizer = _tokenizer(tokenizer or root)
        with self._understood():
            self.model = self._facts(model, status, root)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Refuse a server whose answers have another form.

        Raises:
            CaptureValidationError: they have, or the server does not answer.

        """
        try:
            yield
        except (CaptureValidationError, OSError):
            raise
        except Exception as error:  # A server may send anything.
            raise fail(
                f"server: {self.url} does not answer as expected "
                f"({type(error).__name__}: {error}); start a server of this version "
                "there with --capture-consumers inline",
                "server",
                self.url,
            ) from None

    def _check_consumer(self, status: Mapping[str, Any]) -> None:
        if "inline" not in [one["name"] for one in status.get("consumers", ())]:
            raise fail(
                f"server: {self.url} has no consumer inline; start it with "
                "--capture-consumers inline",
                "server",
                self.url,
            )

    def _facts(
        self, model: Mapping[str, Any], status: Mapping[str, Any], root: str
    ) -> ModelFacts:
        from vllm.v1.residual.model_identity import digest_of_weights

        points = {int(at): tuple(own) for at, own in status["hook_points"].items()}
        layer, names = next(iter(points.items()))
        spec = {"hooks": {names[0]: [layer]}, "positions": "last_prompt"}
        (row,) = self._complete([0], spec, 1).rows.values()  # For its width and dtype.
        if row.dtype not in ITEM_SIZES or row.stored.ndim != 2 or not row.stored.size:
            raise ValueError(f"rows have {row.stored.shape} of dtype {row.dtype!r}")
        return ModelFacts(
            name=self._client.model,
            architecture="",
            weights=digest_of_weights(root) if Path(root).is_dir() else "",
            tokenizer="",
            num_layers=max(points) + 1,
            hidden_size=row.stored.shape[1],
            max_model_len=int(model["max_model_len"]),
            dtype=row.dtype,
            hook_points=points,
            other_widths=status.get("other_widths", {}),
        )

    def _complete(
        self,
        ids: list[int],
        spec: dict[str, Any],
        max_tokens: int,
        readouts: Mapping[str, Any] | None = None,
    ) -> Reply:
        try:
            return self._client.complete(
                ids,
                max_tokens=max_tokens,
                temperature=0,
                capture={"inline": spec},
                readouts=dict(readouts or {}) or None,
            )
        except ClearboxError as error:
            if not 400 <= error.status < 500:
                raise
            said = f"server: the request was refused: {error.message}"
            raise fail(said, "server", self.url) from None

    def run_one(self, prompt: Prompt, rows: RowsSpec, tokens: Tokens) -> Captured:
        """Run a prompt; thread-safe.

        Raises:
            ServerLostError: the server does not answer.
            CaptureRunError: the answer is not what was asked for.
            CaptureValidationError: the request was refused.

        """
        ids, most = prompt.token_ids, rows.max_tokens
        try:
            reply = self._complete(ids, rows.capture(), most, rows.readouts)
            return self._captured(prompt, reply, rows, tokens)
        except (CaptureValidationError, CaptureRunError):
            raise
        except Exception as error:  # A server may send anything.
            if _is_lost(error):
                said = f"the server does not answer: {error!r}"
                raise failed(prompt, said, ServerLostError) from error
            said = f"{type(error).__name__}: {error}"
            raise failed(
                prompt, f"the answer is not what was asked for: {said}"
            ) from error

    def _captured(
        self, prompt: Prompt, reply: Reply, rows: RowsSpec, tokens: Tokens
    ) -> Captured:
        """The rows of a prompt, compared with what was asked for.

        Raises:
            CaptureRunError: the capture or a readout failed.
            Exception: the answer is none, or not to this request.

        """
        result = reply.captures["inline"]
        if result.status != "ok":
            raise failed(prompt, str(result.error))
        generated = reply.token_ids or []
        if not 1 <= len(generated) <= rows.max_tokens:
            raise ValueError(f"{len(generated)} tokens were generated")
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in generated):
            raise ValueError("token_ids are not ids of tokens")
        wanted = positions_of(rows.positions, len(prompt.token_ids), len(generated))
        payload = _tensors(reply.rows, self.model.dtype)
        if rows.keep_when is not None:
            payload = payload or nothing_kept(rows.taps, self.model)
            kept = {*next(iter(payload.positions.values()))}
            wanted = [position for position in wanted if position in kept]
        if sorted(payload) != sorted(rows.taps):
            raise ValueError(f"there are rows of {list(payload)}")
        for (layer, hook), values in payload.items():
            where = f"{hook}.{layer}"
            if payload.positions[layer, hook] != wanted:
                raise ValueError(f"{where} has rows of other positions")
            if list(values.shape) != [len(wanted), self.model.hidden_size]:
                raise ValueError(f"{where} has rows of shape {list(values.shape)}")
            if not values.isfinite().all():
                raise ValueError(f"{where} has values that are not finite")
        found = {name: _result(one) for name, one in reply.readouts.items()}
        check_readouts(found, rows.readouts)
        return captured(prompt, payload, generated, tokens, found)

    def readout_modules(self) -> dict[str, Any]:
        """The server's readout modules, in its own description."""
        with self._understood():
            return dict(self._client.readouts()["modules"])

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _is_lost(error: Exception) -> bool:
    """Whether there was no answer, or the server has failed."""
    if not isinstance(error, ClearboxError) or isinstance(error, InputError):
        return False
    return not error.status or error.status >= 500


def positions_of(selector: Any, num_prompt: int, num_generated: int) -> list[int]:
    """The positions that a selector stands for, in a request that has ended."""
    end = num_prompt + num_generated - 1
    named = {
        "last_prompt": (num_prompt - 1, num_prompt),
        "all_prompt": (0, num_prompt),
        "all_generated": (num_prompt, end),
        "last_generated": (max(num_prompt, end - 1), end),
        "all": (0, end),
    }
    spans = parse_positions(selector, "positions", fail)
    spans = (named[spans],) if isinstance(spans, str) else spans
    return selected(spans, num_prompt, 0, end)


def _tensors(rows: RowSet, dtype: str) -> RowsByTap:
    """The rows of a reply, which must have this dtype."""
    found = RowsByTap()
    for tap, one in rows.items():
        if one.dtype != dtype:
            raise ValueError(f"{tap[1]}.{tap[0]} has values of dtype {one.dtype!r}")
        values = torch.from_numpy(one.stored).view(getattr(torch, dtype))
        found.put(tap, values, {"positions": one.positions, "token_ids": []})
    return found


def _result(told: Readout) -> ReadoutResult:
    """A readout with the dtypes of an engine's."""
    arrays = {
        name: one.astype("int32") if name in INTEGERS else one
        for name, one in told.arrays.items()
    }
    return ReadoutResult(
        told.kind, told.positions, tuple(told.taps), arrays, told.error
    )


def check_readouts(
    found: Mapping[str, ReadoutResult], asked: Mapping[str, Any]
) -> None:
    """Check that each readout has come, with a value for each of its positions.

    Raises:
        ValueError: one has not.

    """
    if found.keys() != asked.keys():
        raise ValueError(f"there are readouts {sorted(found)}, not {sorted(asked)}")
    for name, result in found.items():
        if result.kind != asked[name]["kind"]:
            raise ValueError(f"readout {name!r} is of the kind {result.kind!r}")
        if asked[name].get("reduce", "none") != "none" or result.error is not None:
            continue
        for key, array in result.arrays.items():
            if len(array) != len(result.positions):
                raise ValueError(
                    f"readout {name!r} has {len(array)} {key} at "
                    f"{len(result.positions)} positions"
                )


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise fail(
            f"tokenizer: {name!r}, which the server uses, cannot be loaded here "
            f"({error}); give its path with --tokenizer",
            "tokenizer",
            name,
        ) from None
