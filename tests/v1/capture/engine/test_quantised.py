# SPDX-License-Identifier: Apache-2.0
"""Quantised weights: rows and steering equal those of the dequantised weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.captured import CapturedEngine, asking, prompt
from tests.support.hf_reference import Reference, changing, relative_error
from tests.support.inner_reference import InnerReference
from tests.support.quantised import SCHEMES, multiply_out, quantised

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.multiprocess]

TOLERANCE = {"w4a16": 1e-2, "w8a8": 2e-2, "fp8": 4e-2, "awq": 1e-2, "gptq": 1e-2}
"""Inputs halfway between two numbers of 8 bits are rounded either way."""
PRODUCT = {"float32": 1e-5, "float16": 2**-10}
"""Rounding of a single product in each dtype."""
PROMPTS = [prompt(40, seed=1), prompt(7, seed=2)]
INNER = ("attn_in", "q", "k", "v", "z", "attn_out", "mlp_in", "mlp_act", "mlp_out")


@pytest.fixture(scope="module", params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> Any:
    # Without them there is no product of 4 bits, and sums of products of 8 saturate.
    if request.param != "fp8" and not torch.cpu._is_avx512_supported():
        pytest.skip("upstream multiplies such weights with AVX-512 only")
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
        hook_points=["all"],
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
    with changing(reference.model.model.layers[1], lambda rows: rows + vector):
        engine.check(output, tolerance=TOLERANCE[scheme])
    with pytest.raises(AssertionError):
        engine.check(output, tolerance=TOLERANCE[scheme])


def inner(engine: CapturedEngine, steering: Any = None) -> tuple[Any, list[int]]:
    """The rows inside the blocks for a prompt, and its tokens."""
    asked = asking("all", dict.fromkeys(INNER, "all"), max_tokens=1)
    asked.steering_vectors = steering
    (output,) = engine.run(PROMPTS[:1], asked)
    return engine.rows(output), PROMPTS[0]


def product(engine: CapturedEngine, scheme: str, name: str, rows: Any) -> torch.Tensor:
    """What a dequantised projection makes of captured rows."""
    reference: Any = engine.reference
    module = reference.model.model.layers[1].get_submodule(name)
    with torch.no_grad():
        return module(rows.float())


def test_points_inside_are_those_of_the_weights_multiplied_out(
    engine: CapturedEngine, scheme: str, model: Path
) -> None:
    rows, fed = inner(engine)
    reference = InnerReference(model)
    multiply_out(reference.model, SCHEMES[scheme])
    reference.run(fed)
    assert len(rows) == 3 * len(INNER)
    bound = 2 * TOLERANCE[scheme]  # a branch loses more than the stream
    for tap, found in rows.items():
        expected = reference.rows[tap]
        assert relative_error(found, expected) <= bound, tap
        assert relative_error(found, expected.roll(1, 0)) > bound, tap


@pytest.mark.parametrize(
    ("given", "name", "made"),
    [
        ("attn_in", "self_attn.v_proj", "v"),
        ("z", "self_attn.o_proj", "attn_out"),
        ("mlp_act", "mlp.down_proj", "mlp_out"),
    ],
)
def test_a_projection_makes_of_one_point_the_next(
    engine: CapturedEngine, scheme: str, given: str, name: str, made: str
) -> None:
    rows, _ = inner(engine)
    expected = product(engine, scheme, name, rows[1, given])
    bound = PRODUCT[SCHEMES[scheme].dtype]
    assert relative_error(rows[1, made], expected) <= bound
    halved = product(engine, scheme, name, rows[1, given] * (1 + 4 * bound))
    assert relative_error(rows[1, made], halved) > bound


def test_a_head_that_is_written_enters_the_quantised_projection(
    engine: CapturedEngine, scheme: str
) -> None:
    before, _ = inner(engine)
    none = {"op": "replace", "vector": 0, "heads": [1]}
    after, _ = inner(engine, {"z": {1: none}})
    assert torch.equal(after[1, "z"], before[1, "z"])  # read before it is written
    left = before[1, "z"].clone()
    left[:, 32:] = 0
    expected = product(engine, scheme, "self_attn.o_proj", left)
    bound = PRODUCT[SCHEMES[scheme].dtype]
    assert relative_error(after[1, "attn_out"], expected) <= bound
    assert relative_error(before[1, "attn_out"], expected) > 0.1
