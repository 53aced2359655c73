# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace
from typing import Any

import pytest

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.steering.core.prefix_cache import (
    BY_BLOCK_HASH,
    BY_REQUEST,
    check_external_caches,
)


def config(name: str | None, enabled: bool = True, **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra)
    return SimpleNamespace(
        kv_transfer_config=transfer if name else None,
        steering_config=SimpleNamespace(enabled=enabled),
    )


@pytest.mark.parametrize("name", sorted(BY_BLOCK_HASH | BY_REQUEST))
def test_a_connector_that_tells_steering_apart_is_used(name: str) -> None:
    assert name in KVConnectorFactory._registry, "upstream has renamed it"
    check_external_caches(config(name))


@pytest.mark.parametrize("name", ["ExampleConnector", "LMCacheConnectorV1", "Mine"])
def test_one_that_names_blocks_by_tokens_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"kv_connector='{name}'.*enable-steering"):
        check_external_caches(config(name))
    check_external_caches(config(name, enabled=False))
    check_external_caches(config(None))


def test_each_part_of_several_connectors_counts() -> None:
    parts = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "NixlConnector"}]
    check_external_caches(config("MultiConnector", connectors=parts))
    parts.append({"kv_connector": "LMCacheConnectorV1"})
    with pytest.raises(ValueError, match="LMCacheConnectorV1"):
        check_external_caches(config("MultiConnector", connectors=parts))
