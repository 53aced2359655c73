# SPDX-License-Identifier: Apache-2.0
"""The kernel for probes, compared with float64: on a GPU, or interpreted."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm.triton_utils import HAS_TRITON
from vllm.v1.readouts.modules import ProbeModule
from vllm.v1.readouts.worker.kinds import activated, probe_values, stacked
from vllm.v1.readouts.worker.probe_kernel import ELEMENTWISE, probe_rows, serves

pytestmark = [
    pytest.mark.usefixtures("no_engine"),
    pytest.mark.skipif(not HAS_TRITON, reason="neither a GPU nor the interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STAGED = 40
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def probe(count: int, width: int, activation: str, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(DEVICE)

    return ProbeModule(
        vectors=drawn(count, width),
        bias=drawn(count),
        threshold=drawn(count) if activation == "jumprelu" else None,
        activation=activation,
    )


def staged(width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(STAGED, width, generator=draw).to(DEVICE, dtype)


def in_float64(module: Any, rows: torch.Tensor) -> torch.Tensor:
    """Values before the activation, of a probe or of one probe per row."""
    wide, vectors = rows.double(), module.vectors.double()
    if vectors.dim() == 2:
        return wide @ vectors.T + module.bias.double()
    return (vectors @ wide[:, :, None])[:, :, 0] + module.bias.double()


def kernel(module: Any, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    values = torch.full((len(index), module.bias.shape[-1]), float("nan"))
    if DEVICE == "cuda":
        values = values.pin_memory()
    probe_rows(module, rows, index, values)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return values


def assert_close(found: torch.Tensor, module: Any, before: torch.Tensor) -> None:
    """Values agree unless rounding moves them over a threshold."""
    size = before.abs().max().item() + 1.0
    close = {"atol": 1e-5 * size, "rtol": 1e-5}
    near = torch.zeros_like(before, dtype=torch.bool)
    if module.threshold is not None:
        near = (before - module.threshold).abs() < 1e-4 * size
    expected = activated(before, module).float().cpu()
    found = torch.where(near.cpu(), expected, found)
    torch.testing.assert_close(found, expected, **close)


@given(
    count=st.integers(1, 9),
    width=st.sampled_from([8, 31, 96, 520]),
    num_rows=st.integers(1, 9),
    activation=st.sampled_from(ELEMENTWISE),
    dtype=st.sampled_from(DTYPES),
    own=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_values_are_those_of_float64(
    count: int,
    width: int,
    num_rows: int,
    activation: str,
    dtype: torch.dtype,
    own: bool,
    seed: int,
) -> None:
    rows = staged(width, dtype, seed)
    index = torch.randperm(STAGED, generator=torch.Generator().manual_seed(seed))
    index = index[:num_rows].to(DEVICE)
    module = probe(count, width, activation, seed)
    if own:
        others = [probe(count, width, activation, i) for i in range(num_rows)]
        module = stacked(others)
    assert serves(module, num_rows)
    found = kernel(module, rows, index)
    assert_close(found, module, in_float64(module, rows[index]))


def test_bits_do_not_depend_on_other_rows() -> None:
    module = probe(7, 520, "none", 1)
    rows, index = staged(520, torch.bfloat16, 2), torch.arange(STAGED, device=DEVICE)
    whole = kernel(module, rows, index)
    for one in (0, 5, STAGED - 1):
        alone = kernel(module, rows, index[one : one + 1])
        torch.testing.assert_close(alone[0], whole[one], atol=0, rtol=0)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "jumprelu"])
def test_a_row_that_overflowed_has_torchs_values(activation: str) -> None:
    module = probe(2, 96, activation, 3)
    rows = staged(96, torch.bfloat16, 4)
    rows[0, 5], rows[1, 7] = float("nan"), float("inf")
    found = kernel(module, rows, torch.arange(3, device=DEVICE))
    expected = activated(in_float64(module, rows[:3]), module).float().cpu()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_what_the_kernel_does_not_serve() -> None:
    module = probe(3, 32, "softmax", 7)
    assert not serves(module, 1)
    assert not serves(probe(3, 32, "relu", 7), 257)
    assert not serves(replace(probe(3, 32, "relu", 7), cosine=True), 1)
    rows = staged(32, torch.float32, 8)
    found = probe_values(module, rows)["values"]
    torch.testing.assert_close(found.sum(-1), torch.ones(STAGED, device=DEVICE))
