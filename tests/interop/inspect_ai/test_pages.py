# SPDX-License-Identifier: Apache-2.0
"""The pages about Inspect and vllm-lens run as they are."""

from pathlib import Path

import pytest

pytest.importorskip("inspect_ai", reason="make test-interop")

from tests.interop.pages import code_of, printed_by

pytestmark = pytest.mark.interop


def test_the_page_about_inspect(tmp_path: Path) -> None:
    (code,) = code_of("inspect-ai")
    printed = printed_by(tmp_path, code)
    assert "torch.Size([1, " in printed and "bfloat16 [" in printed


def test_the_page_about_vllm_lens(tmp_path: Path) -> None:
    steered, hooked = code_of("vllm-lens")
    check = "\n    print('found', stream.shape[0], len(norms) > 1)\n"
    assert "found 1 True" in printed_by(tmp_path, f"{steered}\n{hooked}{check}")
