# SPDX-License-Identifier: Apache-2.0
"""The kernels of readouts compile for a GPU, which needs none."""

from pathlib import Path

import pytest

from tests.support.compiled import for_hopper, needs_compiler, on_a_gpu, resources
from vllm.v1.readouts.worker import probe_kernel, sum_kernel

pytestmark = needs_compiler

MOST_REGISTERS = 128
"""Of a thread: two programs then run on a multiprocessor at least."""


@pytest.mark.parametrize(
    ("count", "own", "dtype"),
    [(1, False, "fp32"), (256, False, "bf16"), (3, True, "bf16")],
)
def test_probes_compile_for_hopper(
    count: int, own: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = on_a_gpu(monkeypatch, probe_kernel)
    blocks = zip(
        ("BLOCK_R", "BLOCK_K", "BLOCK_H"), module._blocks(count, 4096, own), strict=True
    )
    values = ("vectors_ptr", "bias_ptr", "threshold_ptr", "out_ptr")
    types = {"rows_ptr": f"*{dtype}", "index_ptr": "*i64"}
    made = for_hopper(
        module._probe_kernel,
        types | dict.fromkeys(values, "*fp32"),
        {"OWN": own, **dict(blocks)},
        num_warps=module.WARPS,
    )
    used, stack = resources(tmp_path, made)
    assert used <= MOST_REGISTERS and stack == 0


def test_sums_compile_for_hopper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = on_a_gpu(monkeypatch, sum_kernel)
    made = for_hopper(
        module._sum_kernel,
        {"rows_ptr": "*bf16", "spans_ptr": "*i64", "out_ptr": "*fp32"},
        {"BLOCK_ROWS": module.BLOCK_ROWS, "BLOCK_WIDTH": module.BLOCK_WIDTH},
        num_warps=4,
    )
    used, stack = resources(tmp_path, made)
    assert used <= MOST_REGISTERS and stack == 0
