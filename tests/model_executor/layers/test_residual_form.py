# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers import residual_form
from vllm.model_executor.layers.residual_form import form


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    form.cache_clear()
    yield
    form.cache_clear()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some of the code, in place of the real one."""
    for name in ("residual_form.py", "residual_ops.py", "linear.py"):
        (tmp_path / name).write_text("pass\n")
    monkeypatch.setattr(residual_form, "__file__", str(tmp_path / "residual_form.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "changes"), [("residual_ops.py", True), ("linear.py", False)]
)
def test_it_changes_with_our_code_alone(code: Path, name: str, changes: bool) -> None:
    before = form()
    (code / name).write_text("pass  # otherwise\n")
    assert form() == before
    form.cache_clear()
    assert (form() != before) == changes


def test_the_compile_cache_knows_it_where_a_feature_is_on(code: Path) -> None:
    off = CaptureConfig(), SteeringConfig()
    on = CaptureConfig(consumers=["logging"]), SteeringConfig(enabled=True)
    before = [one.compute_hash() for one in (*off, *on)]
    (code / "residual_ops.py").write_text("pass  # otherwise\n")
    form.cache_clear()
    after = [one.compute_hash() for one in (*off, *on)]
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [True, True, False, False]
