# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.inner_reference import InnerReference
from tests.v1.steering import _engine, _models
from tests.v1.steering._saes import write_saes


@pytest.fixture(scope="session")
def sae_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_saes(tmp_path_factory.mktemp("saes"))


@pytest.fixture(scope="session", params=_models.matrix())
def steered(
    request: Any, tmp_path_factory: Any, sae_paths: dict[str, str]
) -> Iterator[tuple[Any, InnerReference]]:
    """An engine that steers, and its model in transformers."""
    path = _models.save(request.param, tmp_path_factory.mktemp(request.param))
    llm = _engine.engine(
        path,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        sae=sae_paths,
        max_steering_ops=12,
        hook_points=["mlp_in", "mlp_out"],
    )
    yield llm, InnerReference(path)
    llm.llm_engine.engine_core.shutdown()
