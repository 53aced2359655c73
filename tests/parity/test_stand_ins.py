# SPDX-License-Identifier: Apache-2.0
import importlib
import sys

import pytest

from tests.parity.stand_ins import stand_in


@pytest.fixture(autouse=True)
def modules_as_before() -> None:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_missing_library_can_be_imported() -> None:
    stand_in(("nowhere", "nowhere.inside"))
    module = importlib.import_module("nowhere.inside")
    assert isinstance(module.Anything, type)
    assert importlib.import_module("nowhere").inside is module
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nowhere.elsewhere")


def test_an_installed_library_stays() -> None:
    stand_in(("wave", "email.mime"))
    assert hasattr(importlib.import_module("wave"), "Wave_read")
    assert importlib.import_module("email.mime").__file__


def test_its_attributes_of_the_language_are_missing() -> None:
    stand_in(("nowhere",))
    assert not hasattr(importlib.import_module("nowhere"), "__wrapped__")
