# SPDX-License-Identifier: Apache-2.0
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.client import Client
from tests.hostile.memory import add_reporter
from tests.support.models import llama
from tests.support.server import Server

WIDTH = 64
"""Width of the served model's stream; it has 3 layers."""
INLINE_BYTES = 14 << 20
"""Most bytes of rows that all requests of the served model return together."""


@pytest.fixture(scope="session")
def api_key() -> str:
    return secrets.token_hex(16)


@pytest.fixture(scope="session")
def steering_key() -> str:
    return f"schlüssel-{secrets.token_hex(16)}"


@pytest.fixture(scope="session")
def attacked_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attacked") / "captures"


@pytest.fixture(scope="session")
def attacked(
    tmp_path_factory: pytest.TempPathFactory,
    attacked_root: Path,
    api_key: str,
    steering_key: str,
) -> Iterator[Server]:
    """A server with both features, both keys, and upstream's development routes."""
    opened = Server(
        llama(tmp_path_factory.mktemp("hostile") / "llama"),
        *("--capture-consumers", f"filesystem:root={attacked_root}"),
        *("--capture-consumers", f"inline:max_inflight_bytes={INLINE_BYTES}"),
        *("--enable-steering", "--steering-api-key", steering_key),
        *("--api-key", api_key, "--served-model-name", "tiny"),
        *("--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "8"),
        # Few, so that requests get blocks of the KV cache that others have used.
        *("--num-gpu-blocks-override", "32"),
        *("--capture-consumers", "memory", "--enable-scale-out", "--enable-readouts"),
        *("--vllm-lens-api", "--interp-engine-api"),
        VLLM_SERVER_DEV_MODE="1",
        VLLM_STEERING_API_KEY=f"second-{steering_key}",
        **add_reporter(tmp_path_factory.mktemp("reporter")),
    )
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def client(attacked: Server, api_key: str) -> Client:
    """A client with the server's key."""
    return Client(attacked, api_key)


@pytest.fixture(scope="session")
def stranger(attacked: Server) -> Client:
    """A client without a key."""
    return Client(attacked)


@pytest.fixture(scope="session")
def steerer(attacked: Server, steering_key: str) -> Client:
    """A client with the steering key."""
    return Client(attacked, steering_key)
