# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: rows and steering equal those of the dequantised weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference
from tests.support.quantised import SCHEMES, quantised

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.multiprocess]

TOLERANCE = {"w4a16": 1e-2, "w8a8": 2e-2}
"""Inputs halfway between two integers are rounded either way."""
PROMPTS = [prompt(40, seed=1), prompt(7, seed=2)]


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def engine(
    scheme: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    folder = tmp_path_factory.mktemp(scheme) / "model"
    meant = quantised(model, folder, SCHEMES[scheme])
    opened = CapturedEngine(
        folder,
        reference=meant,
        dtype=SCHEMES[scheme].dtype,
        enable_steering=True,
        max_num_batched_tokens=24,
    )
    assert opened.llm.llm_engine.vllm_config.quant_config is not None
    yield opened
    opened.close()


def test_rows_are_those_of_the_weights_multiplied_out(
    engine: CapturedEngine, scheme: str, model: Path
) -> None:
    outputs = engine.run(PROMPTS, asking("all", max_tokens=6))
    for output in outputs:
        assert len(engine.rows(output)) == 9
        engine.check(output, tolerance=TOLERANCE[scheme])
    meant, engine.reference = engine.reference, Reference(model)
    with pytest.raises(AssertionError):  # the weights before they were quantised
        engine.check(outputs[0], tolerance=TOLERANCE[scheme])
    engine.reference = meant


def test_a_vector_acts_as_on_the_weights_multiplied_out(
    engine: CapturedEngine, scheme: str
) -> None:
    vector = torch.randn(64, generator=torch.Generator().manual_seed(3))
    asked = asking("all", max_tokens=6)
    asked.steering_vectors = {"pre_attn": {1: vector}}
    (output,) = engine.run(PROMPTS[:1], asked)
    reference: Any = engine.reference
    handle = reference.model.model.layers[1].register_forward_pre_hook(
        lambda _, args, kwargs: ((args[0] + vector, *args[1:]), kwargs),
        with_kwargs=True,
    )
    engine.check(output, tolerance=TOLERANCE[scheme])
    handle.remove()
    with pytest.raises(AssertionError):
        engine.check(output, tolerance=TOLERANCE[scheme])
