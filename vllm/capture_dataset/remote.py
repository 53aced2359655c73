# SPDX-License-Identifier: Apache-2.0
"""A server that has the consumer `inline`, and runs single prompts."""

import base64
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.runners import (
    CaptureRunError,
    captured,
    failed,
    nothing_kept,
)
from vllm.capture_dataset.spec import ModelFacts, RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.results import RowsByTap
from vllm.v1.readouts.results import Array, ReadoutResult
from vllm.v1.residual.selectors import parse_positions

TIMEOUT_SECONDS = 600.0
DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of rows."""
MALFORMED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""What reading an answer of another form raises."""


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
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=concurrency)
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, limits=limits
        )
        self.url = url
        self.concurrency = concurrency
        with self._understood():
            model = self._get("/v1/models")["data"][0]
            self._served = str(model["id"])
            self._points = self._hook_points()
        root = str(model.get("root") or self._served)
        self.tokenizer = _tokenizer(tokenizer or root)
        with self._understood():
            self.model = self._facts(model, root)

    @contextmanager
    def _understood(self) -> Iterator[None]:
        """Refuse a server whose answers have another form.

        Raises:
            CaptureValidationError: they have, or the server does not answer.

        """
        try:
            yield
        except CaptureValidationError:
            raise
        except (httpx.HTTPError, *MALFORMED) as error:
            raise fail(
                f"server: {self.url} does not answer as expected "
                f"({type(error).__name__}: {error}); start a server of this version "
                "there with --capture-consumers inline",
                "server",
                self.url,
            ) from None

    def _hook_points(self) -> dict[int, tuple[str, ...]]:
        status = self._get("/v1/capture")
        if "inline" not in [one["name"] for one in status.get("consumers", ())]:
            raise fail(
                f"server: {self.url} has no consumer inline; start it with "
                "--capture-consumers inline",
                "server",
                self.url,
            )
        self._other_widths = status.get("other_widths", {})
        return {
            int(layer): tuple(points) for layer, points in status["hook_points"].items()
        }

    def _facts(self, model: dict[str, Any], root: str) -> ModelFacts:
        from vllm.v1.residual.model_identity import digest_of_weights

        width, dtype = self._try()
        if not (dtype in DTYPES and isinstance(width, int) and width > 0):
            raise ValueError(f"rows have {width!r} values of dtype {dtype!r}")
        return ModelFacts(
            name=self._served,
            architecture="",
            weights=digest_of_weights(root) if Path(root).is_dir() else "",
            tokenizer="",
            num_layers=max(self._points) + 1,
            hidden_size=width,
            max_model_len=int(model["max_model_len"]),
            dtype=dtype,
            hook_points=self._points,
            other_widths=self._other_widths,
        )

    def _try(self) -> tuple[int, str]:
        """The width and the dtype of a row, from a request for one."""
        layer, points = next(iter(self._points.items()))
        spec = {"hooks": {points[0]: [layer]}, "positions": "last_prompt"}
        reply = self._complete([0], spec, 1)
        (entry,) = reply["capture_results"]["inline"]["payload"]
        return entry["shape"][1], entry["dtype"]

    def _get(self, path: str) -> Any:
        with self._understood():
            reply = self._http.get(path)
            reply.raise_for_status()
            return reply.json()

    def _complete(
        self,
        ids: list[int],
        spec: dict[str, Any],
        max_tokens: int,
        readouts: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = {
            "model": self._served,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            "capture": {"inline": spec},
        }
        if readouts:
            body["readouts"] = dict(readouts)
        reply = self._http.post("/v1/completions", json=body)
        if reply.status_code != httpx.codes.OK:
            try:
                message = reply.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = reply.text[:500]
            if reply.is_server_error:
                raise httpx.HTTPStatusError(
                    f"status {reply.status_code}: {message}",
                    request=reply.request,
                    response=reply,
                )
            raise fail(
                f"server: the request was refused: {message}", "server", self.url
            )
        response: dict[str, Any] = reply.json()
        return response

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
        except httpx.HTTPError as error:
            said = f"the server does not answer: {error!r}"
            raise failed(prompt, said, ServerLostError) from error
        except MALFORMED as error:
            said = f"{type(error).__name__}: {error}"
            raise failed(
                prompt, f"the answer is not what was asked for: {said}"
            ) from error

    def _captured(
        self, prompt: Prompt, reply: dict[str, Any], rows: RowsSpec, tokens: Tokens
    ) -> Captured:
        """The rows of a prompt, compared with what was asked for.

        Raises:
            CaptureRunError: the capture or a readout failed.
            Exception: one of `MALFORMED`: the answer is none, or not to this request.

        """
        result = reply["capture_results"]["inline"]
        if result["status"] != "ok":
            raise failed(prompt, str(result["error"]))
        generated = reply["choices"][0]["token_ids"]
        if not 1 <= len(generated) <= rows.max_tokens:
            raise ValueError(f"{len(generated)} tokens were generated")
        if not all(type(token) is int and 0 <= token < 1 << 31 for token in generated):
            raise ValueError("token_ids are not ids of tokens")
        wanted = positions_of(rows.positions, len(prompt.token_ids), len(generated))
        payload = decoded(result["payload"] or [])
        if rows.keep_when is not None:
            payload = payload or nothing_kept(rows.taps, self.model)
            kept = {*next(iter(payload.positions.values()))}
            wanted = [position for position in wanted if position in kept]
        if sorted(payload) != sorted(rows.taps):
            raise ValueError(f"there are rows of {list(payload)}")
        for (layer, hook), values in payload.items():
            where = f"{hook}.{layer}"
            dtype = str(values.dtype).removeprefix("torch.")
            if payload.positions[layer, hook] != wanted:
                raise ValueError(f"{where} has rows of other positions")
            if list(values.shape) != [len(wanted), self.model.hidden_size]:
                raise ValueError(f"{where} has rows of shape {list(values.shape)}")
            if dtype != self.model.dtype:
                raise ValueError(f"{where} has values of dtype {dtype}")
            if not values.isfinite().all():
                raise ValueError(f"{where} has values that are not finite")
        found = decoded_readouts(reply.get("readouts") or {})
        check_readouts(found, rows.readouts)
        return captured(prompt, payload, generated, tokens, found)

    def readout_modules(self) -> dict[str, Any]:
        """The server's readout modules, in its own description."""
        with self._understood():
            return dict(self._get("/v1/readouts")["modules"])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def positions_of(selector: Any, num_prompt: int, num_generated: int) -> list[int]:
    """The positions that a selector stands for, in a request that has ended."""
    end = num_prompt + num_generated - 1
    spans = parse_positions(selector, "positions", fail)
    match spans:
        case "last_prompt":
            spans = ((num_prompt - 1, num_prompt),)
        case "all_prompt":
            spans = ((0, num_prompt),)
        case "all_generated":
            spans = ((num_prompt, end),)
        case "last_generated":
            spans = ((max(num_prompt, end - 1), end),)
        case "all":
            spans = ((0, end),)
    found: set[int] = set()
    for first, stop in spans:
        start = num_prompt if first < 0 else 0
        found.update(range(start + first, min(start + stop, end)))
    return sorted(found)


def decoded(entries: list[dict[str, Any]]) -> RowsByTap:
    """Decode the payload of a response to tensors."""
    rows = RowsByTap()
    for entry in entries:
        data = bytearray(base64.b64decode(entry["data"], validate=True))
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"rows have the dtype {entry['dtype']!r}")
        dtype = getattr(torch, entry["dtype"])
        # No memory is without bytes, which `frombuffer` refuses.
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0).to(dtype)
        values = flat.view(entry["shape"])
        facts = {"positions": entry["positions"], "token_ids": [], "encoding": None}
        rows.put((entry["layer"], entry["hook"]), values, facts)
    return rows


_FACTS = ("kind", "positions", "taps", "error", "note", "num_prompt_tokens")
"""Keys of a result that are no arrays."""
ARRAY_DTYPES = {"token_ids": "int32", "features": "int32"}
"""Dtypes of arrays that are lists in JSON; all others are float32, with NaN for
null."""


def decoded_readouts(response: dict[str, Any]) -> dict[str, ReadoutResult]:
    """Decode the readouts of a response."""
    found = {}
    for name, one in response.items():
        arrays = {
            key: _array(key, value) for key, value in one.items() if key not in _FACTS
        }
        taps = tuple((layer, hook) for layer, hook in one["taps"])
        found[name] = ReadoutResult(
            one["kind"], one["positions"], taps, arrays, one.get("error")
        )
    return found


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


def _array(key: str, value: Any) -> Array:
    if isinstance(value, dict):
        dtype = np.dtype(value["dtype"]).newbyteorder("<")
        flat = np.frombuffer(base64.b64decode(value["data"]), dtype)
        return flat.reshape(value["shape"])
    return np.array(value, ARRAY_DTYPES.get(key, "float32"))


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
