# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import asynchronous
from tests.support.captured import CapturedEngine
from tests.support.models import llama
from tests.v1.readouts._reading import Modules, write_modules


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    return write_modules(tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the roots of the consumers that write files."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session", params=["sync", "async"])
def engine(
    request: pytest.FixtureRequest,
    modules: Modules,
    files: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[CapturedEngine]:
    """An engine with chunked prompts: 24 tokens per step for all requests."""
    ahead = request.param == "async"
    folder: Path = tmp_path_factory.mktemp("llama")
    with asynchronous.allowed():
        opened = CapturedEngine(
            llama(folder),
            max_num_batched_tokens=24,
            async_scheduling=ahead,
            capture_consumers=_consumers(files / request.param),
            **modules.options,
        )
    yield opened
    opened.close()


def _consumers(root: Path) -> list[Any]:
    own = {"params": {"root": str(root / "files")}, "name": "filesystem"}
    table = {"params": {"root": str(root / "arrow")}, "name": "arrow"}
    single = {"root": str(root / "single"), "format": "safetensors"}
    alone = {"name": "arrow", "instance_name": "single", "params": single}
    return ["inline", "memory", own, table, alone]
