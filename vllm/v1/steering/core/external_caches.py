# SPDX-License-Identifier: Apache-2.0
"""Caches of keys and values outside of the engine: which of them know of steering."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BY_BLOCK_HASH = frozenset(
    {
        "HF3FSKVConnector",
        "MooncakeStoreConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""They find blocks by the engine's hashes, which name what steered them."""

BY_REQUEST = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleHiddenStatesConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
    }
)
"""They move the blocks of one request, and keep none for another."""


def check_external_caches(vllm_config: "VllmConfig") -> None:
    """Refuse a connector that may give a request what another one's steering left.

    Raises:
        SteeringValidationError: naming the connector, and the remedy.

    """
    transfer = vllm_config.kv_transfer_config
    if not vllm_config.steering_config.enabled or transfer is None:
        return
    extra = transfer.kv_connector_extra_config
    for name in _connectors(transfer.kv_connector, extra):
        if name not in BY_BLOCK_HASH | BY_REQUEST:
            raise fail(
                f"kv_connector={name!r}, enable_steering=True: this connector is not "
                "known to name what it keeps by the engine's block hashes, so a "
                "request might get keys and values that another one's steering left. "
                f"Use one of {sorted(BY_BLOCK_HASH)}, or start the server without "
                "--enable-steering",
                "kv_connector",
                name,
            )


def _connectors(name: str | None, extra: Mapping[str, Any]) -> Iterator[str]:
    """The connector, or those that it is made of."""
    if name != "MultiConnector":
        yield str(name)
        return
    for part in extra.get("connectors", []):
        inner = part.get("kv_connector_extra_config") or {}
        yield from _connectors(part.get("kv_connector"), inner)
