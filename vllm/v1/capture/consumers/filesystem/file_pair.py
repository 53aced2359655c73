# SPDX-License-Identifier: Apache-2.0
"""The content of the JSON files that describe files of rows."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.capture.consumers.storage.encode import KeyEncoder

REQUEST_FACTS = (
    "layer_convention",
    "model",
    "dtype",
    "num_prompt_tokens",
    "num_generated_tokens",
    "finish_reason",
    "vllm_internal_request_id",
    "client_request_id",
    "sample_index",
    "pipeline_parallel_rank",
    "pipeline_parallel_size",
)
"""Fields that are the same for all keys of a request."""

ROW_FACTS = ("positions", "token_ids")
"""Fields with one value per row."""


def key_json(
    request_id: str, sidecar: dict[str, Any], encoder: KeyEncoder
) -> dict[str, Any]:
    """The JSON of a file with one key (layout `per_file`).

    Args:
        request_id: the request's name.
        sidecar: the key's sidecar.
        encoder: the encoder, after it has encoded all rows.

    """
    return {
        "request_id": request_id,
        "layer": sidecar["layer"],
        "hook": sidecar["hook"],
        "shape": [sidecar["num_rows"], sidecar["hidden_size"]],
        **{name: sidecar[name] for name in (*REQUEST_FACTS, *ROW_FACTS)},
        **_readout(sidecar),
        **_note(sidecar),
        **_encoding(encoder),
    }


def request_facts(sidecars: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts that all keys of a request share; row facts only if all agree."""
    first = sidecars[0]
    facts = {name: first[name] for name in REQUEST_FACTS}
    for name in ROW_FACTS:
        if all(sidecar[name] == first[name] for sidecar in sidecars):
            facts[name] = first[name]
    return facts


def entry(
    sidecar: dict[str, Any],
    shared: dict[str, Any],
    offset: int,
    encoder: KeyEncoder,
) -> dict[str, Any]:
    """The index entry of a key in a file with several keys.

    Args:
        sidecar: the key's sidecar.
        shared: the result of `request_facts`, which is not repeated.
        offset: of the key's first byte in the file.
        encoder: the encoder, after it has encoded all rows.

    """
    own = {name: sidecar[name] for name in ROW_FACTS if name not in shared}
    if sidecar["dtype"] != shared["dtype"]:
        own["dtype"] = sidecar["dtype"]
    return {
        "layer": sidecar["layer"],
        "hook": sidecar["hook"],
        "offset": offset,
        "nbytes": encoder.num_bytes,
        "shape": [sidecar["num_rows"], sidecar["hidden_size"]],
        **_encoding(encoder),
        **own,
        **_readout(sidecar),
        **_note(sidecar),
    }


def _encoding(encoder: KeyEncoder) -> dict[str, Any]:
    checksum = encoder.checksum
    return {
        "codec": encoder.describe(),
        **({} if checksum is None else {"crc32c": checksum}),
    }


def _readout(sidecar: dict[str, Any]) -> dict[str, Any]:
    return {"readout": sidecar["readout"]} if "readout" in sidecar else {}


def _note(sidecar: dict[str, Any]) -> dict[str, str]:
    return {"note": sidecar["capture_note"]} if "capture_note" in sidecar else {}
