# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import llama
from tests.support.server import OWN_WORKER, Server


@pytest.fixture(scope="session")
def capture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama(tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="session")
def capture_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="session")
def capture_server(capture_model: Path, capture_root: Path) -> Iterator[Server]:
    """A server with consumers for files, its log and its responses."""
    opened = Server(
        capture_model,
        *("--capture-consumers", f"filesystem:root={capture_root}"),
        *("--capture-consumers", 'logging:hooks={"post_block":[0,2]}'),
        *("--capture-consumers", "inline", "--capture-consumers", "memory"),
        *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "256", "--max-num-seqs", "8"),
        "--enable-scale-out",
        **OWN_WORKER,
    )
    yield opened
    opened.close()
