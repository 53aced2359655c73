# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm.config.capture import CaptureConfig
from vllm.config.steering import SteeringConfig
from vllm.model_executor.layers.residual import cache_key
from vllm.model_executor.layers.residual.cache_key import form


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    form.cache_clear()
    yield
    form.cache_clear()


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some of the code, in place of the real folder."""
    ours = tmp_path / "residual"
    (ours / "passes").mkdir(parents=True)
    for name in ("cache_key.py", "capture_op.py", "passes/one.py", "../linear.py"):
        (ours / name).write_text("pass\n")
    monkeypatch.setattr(cache_key, "__file__", str(ours / "cache_key.py"))
    return ours


@pytest.mark.parametrize(
    ("name", "changes"),
    [("capture_op.py", True), ("passes/one.py", True), ("../linear.py", False)],
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
    (code / "capture_op.py").write_text("pass  # otherwise\n")
    form.cache_clear()
    after = [one.compute_hash() for one in (*off, *on)]
    same = [one == other for one, other in zip(before, after, strict=True)]
    assert same == [True, True, False, False]
