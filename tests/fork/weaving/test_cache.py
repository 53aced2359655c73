# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from fork.weaving.cache import forget_unused, keep, recall


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEARBOX_CACHE", str(tmp_path))
    return tmp_path / "woven"


def test_what_was_kept_is_recalled() -> None:
    keep("a", {"source": "x = '\u00e4'\n"})
    assert recall("a") == {"source": "x = '\u00e4'\n"}
    assert recall("b") is None


def test_a_damaged_record_is_no_record(cache: Path) -> None:
    keep("a", {"source": "x"})
    (cache / "a.json").write_text('{"sou')
    assert recall("a") is None


def test_only_unused_records_are_forgotten(cache: Path) -> None:
    for key in ("old", "used", "new"):
        keep(key, {})
    for key in ("old", "used"):
        os.utime(cache / f"{key}.json", (0, 0))
    recall("used")
    forget_unused()
    assert sorted(os.listdir(cache)) == ["new.json", "used.json"]
