# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.fork._checkout import Mini, make_mini


@pytest.fixture
def mini(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mini:
    """A miniature checkout with its own cache and no decoder-layer weave."""
    monkeypatch.setenv("CLEARBOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fork.weaving.weaver._MODEL_FOLDERS", ())
    return make_mini(tmp_path / "checkout")
