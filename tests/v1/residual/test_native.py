# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.v1.residual import native


def test_the_library_is_built() -> None:
    assert native.library() is not None, "fork build leaves the native library out here"


def test_a_missing_library_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(native, "MODULE", "vllm.v1.no_such_library")
    monkeypatch.setattr(native.logger, "warning", lambda text, *_: said.append(text))
    native.library.cache_clear()
    assert native.library() is native.library() is None
    native.library.cache_clear()
    assert len(said) == 1
