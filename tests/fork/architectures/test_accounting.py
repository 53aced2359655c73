# SPDX-License-Identifier: Apache-2.0
"""An architecture that is not accounted for fails the build."""

from pathlib import Path

import pytest

from fork.architectures.accounting import architecture_faults, unknown_architectures
from fork.upstream.release import Release
from fork.weaving.weaver import WovenFile
from tests.fork.architectures._release import EMPTY, MODELS, TABLES, write

LAYERS = {
    f"{MODELS}/first.py": frozenset({"FirstDecoderLayer"}),
    f"{MODELS}/chosen.py": frozenset({"ChosenDecoderLayer"}),
}
TEXT = TABLES["_TEXT_GENERATION_MODELS"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARBOX_CACHE", str(tmp_path / "cache"))


def release(root: Path) -> Release:
    made = Release.__new__(Release)
    for name, value in {"root": root, "sha256": "0", "version": "1.2.3"}.items():
        object.__setattr__(made, name, value)
    return made


def woven() -> list[WovenFile]:
    return [WovenFile(m, None, (), tuple(found)) for m, found in LAYERS.items()]


def test_architectures_that_lead_to_layers_are_known(tmp_path: Path) -> None:
    assert unknown_architectures(write(tmp_path), LAYERS) == []


@pytest.mark.usefixtures("cache")
def test_it_stops_the_build_each_time(tmp_path: Path) -> None:
    root = write(tmp_path, TABLES | {"_TEXT_GENERATION_MODELS": TEXT | EMPTY})
    for _ in range(2):
        (fault,) = architecture_faults(release(root), woven())
        assert "has EmptyForCausalLM, but no decoder layer was found" in fault.sentence


@pytest.mark.usefixtures("cache")
def test_an_unknown_table_stops_the_build(tmp_path: Path) -> None:
    root = write(tmp_path, TABLES | {"_SINGING_MODELS": {}})
    (fault,) = architecture_faults(release(root), woven())
    assert "_SINGING_MODELS" in fault.sentence
