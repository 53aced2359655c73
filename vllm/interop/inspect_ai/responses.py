# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the provider.

`GenerateConfig.extra_body` becomes the body of a request. Responses with rows are in
binary form: safetensors, with the JSON in their metadata.
"""

import json
from collections.abc import Mapping
from typing import Any

import httpx2
from clearbox_client import bulk


def document_in(response: httpx2.Response) -> Any:
    """The JSON of a response; rows in binary form become its `data`, as bytes.

    Text that is not JSON is returned as it is, unless it is declared as JSON.

    Raises:
        ValueError: the server sent something else than it says.

    """
    kind = response.headers.get("content-type", "").partition(";")[0]
    if kind != bulk.SAFETENSORS:
        try:
            return json.loads(response.content)
        except ValueError:
            if kind.endswith("json"):
                raise
            return response.text
    content = memoryview(bytearray(response.content))  # tensors must be writable
    return bulk.document_in(content, kind)


ARGS = "extra_args"
SHOWN = 60
"""Most characters of a value in a log."""


def body_of(extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """The request's fields: `extra_args` become `vllm_xargs`, tensors become JSON.

    `return_token_ids` is always set. A `lora_request` is not included: its name is the
    request's model, see `lora_name`.
    """
    body = {k: v for k, v in extra_body.items() if k not in (ARGS, "lora_request")}
    args = {**(body.pop("vllm_xargs", None) or {}), **(extra_body.get(ARGS) or {})}
    if args:
        body["vllm_xargs"] = {name: _text(value) for name, value in args.items()}
    body = {name: plain(value) for name, value in body.items()}
    return {**body, "return_token_ids": True}


def lora_name(extra_body: Mapping[str, Any]) -> str | None:
    """The adapter that a request names, which is a model name on a server."""
    given = extra_body.get("lora_request")
    name = given.get("lora_name") if isinstance(given, Mapping) else None
    return None if name is None else str(name)


def layers_of(extra_body: Mapping[str, Any]) -> list[int] | None:
    """The layers that `output_residual_stream` names, ascending; None for all."""
    wanted = None
    for name in ("vllm_xargs", ARGS):
        wanted = (extra_body.get(name) or {}).get("output_residual_stream", wanted)
    if isinstance(wanted, str):
        try:
            wanted = json.loads(wanted)
        except ValueError:
            return None  # the server reports the error
    return sorted(set(wanted)) if isinstance(wanted, list) else None


def shown(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for a log: long lists and texts are replaced by their size."""
    return {name: _short(value) for name, value in body.items()}


def plain(value: Any) -> Any:
    """Convert a value to JSON types; tensors and arrays become lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "model_dump"):  # a SteeringVector, ours or vllm-lens'
        return plain(value.model_dump())
    if hasattr(value, "tolist"):  # an array or a tensor
        return value.tolist()
    return value


def _text(value: Any) -> Any:
    """Convert a value for `vllm_xargs`: text, number or list, else JSON text."""
    value = plain(value)
    return json.dumps(value) if isinstance(value, (bool, list, dict)) else value


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list):
        return value if len(str(value)) <= SHOWN else f"<list of {len(value)}>"
    if isinstance(value, str) and len(value) > SHOWN:
        return f"<text of {len(value)} characters>"
    return value
