# SPDX-License-Identifier: Apache-2.0
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.v1.residual.sae import _layouts as write
from tests.v1.residual.sae._layouts import K, chosen, parts
from vllm.v1.residual.sae import load_sae
from vllm.v1.residual.sae.files import SAEFileError

BASE = ("W_enc", "W_dec", "b_enc", "b_dec")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architecture": "temporal"}, "one|alone"),
        ({"architecture": "matching_pursuit"}, "one token's row"),
        ({"architecture": "standard", "activation_fn": "tanh-relu"}, "tanh-relu"),
        ({"architecture": "topk"}, "k is None"),
        ({"architecture": "topk", "k": 21}, "1 to 20"),
        ({"architecture": "jumprelu"}, "threshold"),
        ({"architecture": "gated"}, "r_mag"),
        ({"normalize_activations": "covariance_whitening"}, "fold them"),
    ],
)
def test_what_saelens_folders_cannot_be_taken(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = write.saelens(tmp_path / "sae", chosen(parts(), *BASE), **config)
    with pytest.raises(SAEFileError, match=said):
        load_sae(folder)


def test_a_factor_of_fine_tuning_is_refused_unless_it_is_one(tmp_path: Path) -> None:
    tensors = chosen(parts(), *BASE)
    ones = tensors | {"scaling_factor": torch.ones(write.D_SAE)}
    load_sae(write.saelens(tmp_path / "ones", ones))
    twos = tensors | {"scaling_factor": torch.full((write.D_SAE,), 2.0)}
    with pytest.raises(SAEFileError, match="fine-tuning"):
        load_sae(write.saelens(tmp_path / "twos", twos))


@pytest.mark.parametrize("name", ["W_dec", "b_enc", "b_dec"])
def test_shapes_must_fit_each_other(tmp_path: Path, name: str) -> None:
    tensors = chosen(parts(), *BASE)
    tensors[name] = tensors[name][:-1].clone()
    if name == "b_dec":
        tensors["b_dec"] = torch.zeros(write.D_IN - 1)
    folder = write.saelens(tmp_path / "sae", tensors, apply_b_dec_to_input=False)
    with pytest.raises(SAEFileError, match=rf"(?i){name}|W_dec"):
        load_sae(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(tmp_path: Path, value: float) -> None:
    tensors = chosen(parts(), *BASE)
    tensors["W_enc"][0, 0] = value
    with pytest.raises(SAEFileError, match="NaN or infinity"):
        load_sae(write.saelens(tmp_path / "sae", tensors))


def test_paths_that_hold_no_sae(tmp_path: Path) -> None:
    with pytest.raises(SAEFileError, match="no such file or folder"):
        load_sae(tmp_path / "missing")
    with pytest.raises(SAEFileError, match="known layout"):
        load_sae(tmp_path)
    folder = write.sparsify(tmp_path / "layers.1", parts())
    (folder / "sae.safetensors").write_bytes(b"nonsense")
    with pytest.raises(SAEFileError, match="not a safetensors file"):
        load_sae(folder)
    (folder / "cfg.json").write_text("[]")
    with pytest.raises(SAEFileError, match="object"):
        load_sae(folder)


class _Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must not run",))


def test_code_in_a_file_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Llama-3.1-8B-Instruct-SAE-l19.pth"
    file.write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(SAEFileError, match="not a file of tensors"):
        load_sae(file)
    torch.save({"a": _Harmful()}, file)
    with pytest.raises(SAEFileError, match="not a file of tensors"):
        load_sae(file)
    assert "this must not run" not in capsys.readouterr().out


def test_sparsify_needs_k_and_a_known_activation(tmp_path: Path) -> None:
    with pytest.raises(SAEFileError, match="k is None"):
        load_sae(write.sparsify(tmp_path / "layers.1", parts(), k=None))
    with pytest.raises(SAEFileError, match="signed|topk"):
        load_sae(write.sparsify(tmp_path / "layers.2", parts(), signed=True, k=K))


def test_dictionaries_of_an_unknown_class_are_refused(tmp_path: Path) -> None:
    folder = write.dictionary_learning(tmp_path / "t", {}, "IdentityDict")
    with pytest.raises(SAEFileError, match="IdentityDict"):
        load_sae(folder)


def test_llama_scope_must_say_the_mean_norm(tmp_path: Path) -> None:
    folder = write.llama_scope(tmp_path / "L7R", parts(), 0.2, -1.0)
    with pytest.raises(SAEFileError, match="mean norm"):
        load_sae(folder)


def test_cross_layer_transcoders_are_refused(tmp_path: Path) -> None:
    p = parts()
    p["W_dec"] = torch.randn(write.D_SAE, 3, write.D_IN)
    with pytest.raises(SAEFileError, match="cross-layer"):
        load_sae(write.gemma_scope_2(tmp_path / "layer_1", p))
