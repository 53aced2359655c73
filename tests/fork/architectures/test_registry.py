# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

from fork.architectures.registry import names
from tests.fork.architectures._release import MODELS, write


def test_every_name_is_listed_once_and_as_what_it_can_do_most(tmp_path: Path) -> None:
    found = {name.architecture: name for name in names(write(tmp_path))}
    assert {name: found[name].table for name in found} == {
        "FirstForCausalLM": "text",
        "ChosenForCausalLM": "text",
        "HeirForCausalLM": "text",
        "AnyForCausalLM": "text",
        "NamedForCausalLM": "multimodal",
        "FirstModel": "pooling",
    }
    assert found["FirstModel"].place == (f"{MODELS}/first.py", "FirstForCausalLM")


def test_names_that_a_table_takes_over_are_not_listed_again(tmp_path: Path) -> None:
    root = write(tmp_path)
    path = root / MODELS / "registry.py"
    path.write_text(path.read_text().replace("_EMBEDDING_MODELS = {", TAKEN, 1))
    assert len(names(root)) == len(names(write(tmp_path / "other")))


TAKEN = "_EMBEDDING_MODELS = {**{k: v for k, v in _TEXT_GENERATION_MODELS.items()}, "
