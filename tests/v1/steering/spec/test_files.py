# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm.v1.steering.errors import SteeringValidationError
from vllm.v1.steering.spec.files import FORMAT, load_module, save_module

VECTOR = torch.arange(4.0)


def test_written_then_read_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "calm.safetensors"
    save_module(
        path,
        {"post_block": {3: VECTOR}},
        decode_vectors={"pre_attn": {0: VECTOR * 2}},
        metadata={"model": "demo"},
    )
    found = load_module(path)
    assert torch.equal(found["vectors"]["post_block"]["3"], VECTOR)
    assert torch.equal(found["decode_vectors"]["pre_attn"]["0"], VECTOR * 2)
    assert found.keys() == {"vectors", "decode_vectors"}


def test_json_is_the_form_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "calm.json"
    body = {"vectors": {"post_block": {"3": [1.0]}}}
    path.write_text(json.dumps({**body, "metadata": {"model": "demo"}}))
    assert load_module(path) == body


def test_files_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    def refused(name: str, said: str) -> None:
        with pytest.raises(SteeringValidationError, match=said):
            load_module(tmp_path / name)

    refused("missing.json", "no file")
    (tmp_path / "a.txt").write_text("{}")
    refused("a.txt", "neither")
    (tmp_path / "a.json").write_text("{")
    refused("a.json", "not JSON")
    (tmp_path / "b.json").write_text("[]")
    refused("b.json", "object")
    convention = {"metadata": {"layer_convention": "1-based"}}
    (tmp_path / "c.json").write_text(json.dumps(convention))
    refused("c.json", "1-based")
    (tmp_path / "a.safetensors").write_bytes(b"nonsense")
    refused("a.safetensors", "not a safetensors file")
    save_file({"post_block.3": VECTOR}, tmp_path / "b.safetensors")
    refused("b.safetensors", "format")
    marks = {"format": FORMAT}
    save_file({"layer3": VECTOR}, tmp_path / "c.safetensors", metadata=marks)
    refused("c.safetensors", "not named")
