# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.cases import GENTLE, Case, common
from tests.parity.needs import CUTLASS, DEEP_GEMM, Need
from tests.parity.substitutes import EXACT_GELU
from tests.parity.twins import Twin
from vllm.utils import import_utils

PLAIN = {"architecture": "ToyForCausalLM", "model_type": "llama", "options": common()}


def test_a_kernel_for_bfloat16_is_asked_for_no_more_than_that() -> None:
    case = Case(**PLAIN, on_cuda={"num_hidden_layers": 2})
    on_cpu, on_cuda = case.on("cpu"), case.on("cuda")
    assert (on_cpu.dtype, on_cpu.options["num_hidden_layers"]) == ("float32", 3)
    assert (on_cuda.dtype, on_cuda.options["num_hidden_layers"]) == ("bfloat16", 2)
    assert on_cuda.scale == GENTLE


def test_some_obstacles_are_a_cpu_s_alone() -> None:
    assert Case(**PLAIN).obstacle("cpu") is None
    unable = Case(**PLAIN, cannot="no kernel")
    assert (unable.obstacle("cpu"), unable.obstacle("cuda")) == ("no kernel", None)
    assert Case(**PLAIN, never="lost weights").obstacle("cuda") == "lost weights"


@pytest.mark.parametrize("there", [True, False])
def test_a_library_that_is_missing_is_a_gpu_s_obstacle(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_utils, "has_cutedsl", lambda: there)
    case = Case(**PLAIN, needs=(CUTLASS,))
    assert case.obstacle("cpu") is None
    assert case.obstacle("cuda") == (None if there else CUTLASS.reason)


@pytest.mark.parametrize("need", [CUTLASS, DEEP_GEMM], ids=lambda need: need.check)
def test_upstream_says_whether_a_library_is_there(need: Need) -> None:
    assert need.is_met() in (True, False)


def test_what_a_comparison_does_besides_is_noted() -> None:
    assert Case(**PLAIN).notes == []
    case = Case(**PLAIN, note="slowly", substitute=EXACT_GELU, stand_ins=("eyes", "x"))
    assert case.notes[:2] == [EXACT_GELU.why, "slowly"]
    assert "eyes is not installed" in case.notes[2]


def test_a_twin_has_the_weights_under_its_names(tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "config.json").write_text('{"architectures": ["Toy"], "dtype": "f"}')
    weights = {"a.q.weight": torch.ones(2, 4), "a.k.weight": torch.zeros(1, 4)}
    more = {"a.spare.weight": torch.ones(4), "b.o.weight": torch.arange(3.0)[None]}
    save_file(weights | more, library / "model.safetensors")
    twin = Twin(
        rename=(("a.", "c."),),
        fuse={"qk": ("q", "k")},
        transposed=("o.weight",),
        unread=("spare",),
    )
    found = load_file(twin.save(library, tmp_path / "twin") / "model.safetensors")
    assert set(found) == {"c.qk.weight", "b.o.weight"}
    assert found["b.o.weight"].tolist() == [[0.0], [1.0], [2.0]]
    assert found["c.qk.weight"].tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]
