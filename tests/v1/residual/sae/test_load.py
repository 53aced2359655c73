# SPDX-License-Identifier: Apache-2.0
"""Every layout, compared with its own formula in float64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.v1.residual.sae import _layouts as write
from tests.v1.residual.sae._layouts import D_IN, K, Parts, chosen, linear, parts, rows
from vllm.v1.readouts.modules import describe_module
from vllm.v1.residual.sae import SparseAutoencoder, decode, encode, load_sae
from vllm.v1.residual.sae.files import SAEFileError

PLACE = "blocks.8.hook_resid_post"

Formula = Callable[[Parts, torch.Tensor], torch.Tensor]


def _check(
    sae: SparseAutoencoder,
    activations: torch.Tensor,
    reconstruction: torch.Tensor,
) -> None:
    found = encode(sae, rows())
    assert torch.equal(found != 0, activations != 0)
    torch.testing.assert_close(found.double(), activations, atol=1e-5, rtol=1e-5)
    restored = decode(sae, found, rows()).double()
    torch.testing.assert_close(restored, reconstruction, atol=1e-4, rtol=1e-4)


def _double(p: Parts) -> Parts:
    return {name: tensor.double() for name, tensor in p.items()}


def _check_formula(
    sae: SparseAutoencoder,
    p: Parts,
    formula: "Formula",
    *,
    subtracts: bool = False,
    scale: float = 1.0,
    skip: torch.Tensor | None = None,
) -> None:
    """Compare with a formula.

    Args:
        sae: as loaded.
        p: its parts.
        formula: the activations of rows.
        subtracts: whether b_dec is subtracted from rows.
        scale: factor of rows, by which the output is divided.
        skip: a matrix whose product with rows is added to the output.

    """
    d, x = _double(p), rows().double()
    activations = formula(d, x * scale - d["b_dec"] * subtracts)
    back = (activations @ d["W_dec"] + d["b_dec"]) / scale
    if skip is not None:
        back = back + x @ skip.double()
    _check(sae, activations, back)


def _standard(p: Parts, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["W_enc"] + p["b_enc"]).relu()


def _jumprelu(p: Parts, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["W_enc"] + p["b_enc"]
    return h.relu() * (h > p["threshold"])


def _gated(p: Parts, x: torch.Tensor) -> torch.Tensor:
    gate = (x @ p["W_enc"] + p["b_gate"]) > 0
    return gate * (x @ (p["W_enc"] * p["r_mag"].exp()) + p["b_mag"]).relu()


def _largest(h: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    kept = by.topk(K, dim=-1).indices
    return torch.zeros_like(h).scatter(-1, kept, h.gather(-1, kept))


def _topk(p: Parts, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["W_enc"] + p["b_enc"]
    return _largest(h, h).relu()


def _abstopk(p: Parts, x: torch.Tensor) -> torch.Tensor:
    h = x @ p["W_enc"] + p["b_enc"]
    return _largest(h, h.abs())


def _groupmax(p: Parts, x: torch.Tensor) -> torch.Tensor:
    groups = (x @ p["W_enc"] + p["b_enc"]).relu().unflatten(-1, (K, -1))
    return (groups * (groups == groups.amax(-1, keepdim=True))).flatten(-2)


BASE = ("W_enc", "W_dec", "b_enc", "b_dec")


@pytest.mark.parametrize("subtracts", [True, False])
@pytest.mark.parametrize(
    ("architecture", "formula", "names", "config"),
    [
        ("standard", _standard, BASE, {}),
        ("jumprelu", _jumprelu, (*BASE, "threshold"), {}),
        ("matryoshka_batchtopk", _jumprelu, (*BASE, "threshold"), {"k": 3}),
        ("batchtopk", _jumprelu, (*BASE, "threshold"), {"k": 3}),
        ("gated", _gated, ("W_enc", "W_dec", "b_dec", "r_mag", "b_mag", "b_gate"), {}),
        ("topk", _topk, BASE, {"k": K}),
        ("abstopk", _abstopk, BASE, {"k": K}),
    ],
)
def test_saelens_architectures_are_what_their_formula_says(
    tmp_path: Path,
    architecture: str,
    formula: Formula,
    names: tuple[str, ...],
    config: dict[str, Any],
    subtracts: bool,
) -> None:
    p = parts()
    folder = write.saelens(
        tmp_path / "sae",
        chosen(p, *names),
        architecture=architecture,
        apply_b_dec_to_input=subtracts,
        normalize_activations="none",
        metadata={"hook_name": PLACE, "model_name": "some-model"},
        **config,
    )
    sae = load_sae(folder)
    _check_formula(sae, p, formula, subtracts=subtracts)
    assert (sae.reads.tap, sae.writes.tap) == ((8, "post_block"),) * 2
    assert (sae.layout, sae.model) == ("saelens", "some-model")


def test_pre_activations_times_decoder_norms_are_folded(tmp_path: Path) -> None:
    p = parts()
    folder = write.saelens(
        tmp_path / "sae",
        chosen(p, *BASE),
        architecture="topk",
        k=K,
        rescale_acts_by_decoder_norm=True,
    )
    d = _double(p)
    norms = d["W_dec"].norm(dim=-1)
    h = ((rows().double() - d["b_dec"]) @ d["W_enc"] + d["b_enc"]) * norms
    activations = _largest(h, h).relu()
    back = (activations / norms) @ d["W_dec"] + d["b_dec"]
    _check(load_sae(folder), activations, back)


def test_a_top_k_of_an_old_release_and_its_threshold_of_training(
    tmp_path: Path,
) -> None:
    p = parts()
    old = write.saelens(
        tmp_path / "old",
        chosen(p, *BASE),
        hook_point=PLACE,
        activation_fn_str="topk",
        activation_fn_kwargs={"k": K},
        normalize_activations=False,
    )
    sae = load_sae(old)
    assert (sae.selection, sae.k, sae.reads.tap) == ("topk", K, (8, "post_block"))
    run = write.saelens(
        tmp_path / "run",
        {**chosen(p, *BASE), "topk_threshold": torch.tensor(0.5)},
        architecture="batchtopk",
        k=K,
    )
    assert load_sae(run).threshold.tolist() == [0.5] * write.D_SAE


@pytest.mark.parametrize("norm", ["constant_norm_rescale", "layer_norm"])
def test_norms_of_rows_are_taken_off_and_given_back(tmp_path: Path, norm: str) -> None:
    p = parts()
    folder = write.saelens(
        tmp_path / "sae",
        chosen(p, *BASE),
        architecture="standard",
        normalize_activations=norm,
    )
    d, x = _double(p), rows().double()
    if norm == "layer_norm":
        std = x.std(-1, keepdim=True)
        mean = x.mean(-1, keepdim=True)
        taken = (x - mean) / (std + 1e-5)
    else:
        std, mean = x.norm(dim=-1, keepdim=True) / D_IN**0.5, torch.zeros(1)
        taken = x / std
    activations = _standard(d, taken - d["b_dec"])
    back = (activations @ d["W_dec"] + d["b_dec"]) * std + mean
    _check(load_sae(folder), activations, back)


def test_a_mean_norm_is_folded_where_the_file_says_it(tmp_path: Path) -> None:
    p = parts()
    config = {"normalize_activations": "expected_average_only_in"}
    silent = write.saelens(tmp_path / "silent", chosen(p, *BASE), **config)
    with pytest.raises(ValueError, match="norm_scaling_factor"):
        load_sae(silent)
    config |= {"norm_scaling_factor": 0.25}
    said = write.saelens(tmp_path / "said", chosen(p, *BASE), **config)
    _check_formula(load_sae(said), p, _standard, subtracts=True, scale=0.25)


@pytest.mark.parametrize("kind", ["transcoder", "jumprelu_skip_transcoder"])
def test_transcoders_read_here_and_write_there(tmp_path: Path, kind: str) -> None:
    p = parts()
    names = [*BASE, "W_skip", "threshold"] if "skip" in kind else [*BASE]
    folder = write.saelens(
        tmp_path / "sae",
        chosen(p, *names),
        architecture=kind,
        metadata={
            "hook_name": "blocks.4.hook_mlp_in",
            "hf_hook_name": "model.layers.4.pre_feedforward_layernorm.output",
            "hook_name_out": "blocks.4.hook_mlp_out",
        },
    )
    sae = load_sae(folder)
    assert (sae.reads.tap, sae.writes.tap) == ((4, "mlp_in"), (4, "mlp_add"))
    skips = "skip" in kind
    formula = _jumprelu if skips else _standard
    _check_formula(sae, p, formula, skip=p["W_skip"].T if skips else None)
    other = load_sae(f"{folder}?layer=3&hook=post_attn")
    assert (other.reads.tap, other.writes.tap) == ((3, "post_attn"), (4, "mlp_add"))
    described = describe_module("sae", str(folder), other).describe()
    assert (described["layer"], described["hook"]) == (3, "post_attn")
    assert described["writes"] == {"layer": 4, "hook": "mlp_add"}
    for said in ("layer=x&hook=mlp_in", "layer=3", "hook=mlp_in", "layer=3&hook="):
        with pytest.raises(SAEFileError, match="where the SAE reads"):
            load_sae(f"{folder}?{said}")


def test_gemma_scope_1_is_jumprelu_of_the_stream(tmp_path: Path) -> None:
    p = parts()
    folder = tmp_path / "gemma-scope-2b-pt-res" / "layer_20" / "width_16k"
    sae = load_sae(write.gemma_scope_1(folder / "average_l0_71", p))
    _check_formula(sae, p, _jumprelu)
    assert sae.reads.tap == (20, "post_block")
    assert sae.model == "google/gemma-2-2b"


def test_gemma_scopes_mlps_are_what_is_added_and_heads_no_hook_point(
    tmp_path: Path,
) -> None:
    for kind, tap in (("mlp", (3, "mlp_add")), ("att", None)):
        folder = tmp_path / f"gemma-scope-2b-pt-{kind}" / "layer_3" / "width_16k"
        sae = load_sae(write.gemma_scope_1(folder, parts()))
        assert sae.reads.tap == tap
        assert load_sae(folder, (3, "mlp_out")).reads.tap == (3, "mlp_out")


def test_gemma_scopes_embeddings_are_taken_after_they_are_scaled(
    tmp_path: Path,
) -> None:
    p = parts()
    folder = tmp_path / "gemma-scope-2b-pt-res" / "embedding" / "width_4k"
    sae = load_sae(write.gemma_scope_1(folder, p))
    d = _double(p)
    activations = _jumprelu(d, rows().double() / D_IN**0.5)
    assert sae.reads.tap == (0, "pre_attn")
    found = encode(sae, rows()).double()
    torch.testing.assert_close(found, activations, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("said", [True, False])
def test_gemma_scope_2_says_its_place_in_a_file_or_by_its_path(
    tmp_path: Path, said: bool
) -> None:
    p = parts()
    config = {
        "hf_hook_point_in": "model.layers.12.output",
        "model_name": "google/gemma-3-1b-pt",
    }
    folder = tmp_path / "gemma-scope-2-1b-pt" / "resid_post"
    folder = folder / "layer_12_width_16k_l0_small"
    sae = load_sae(write.gemma_scope_2(folder, p, **(config if said else {})))
    _check_formula(sae, p, _jumprelu)
    assert sae.reads.tap == (12, "post_block")
    assert sae.model == ("google/gemma-3-1b-pt" if said else "google/gemma-3-1b")


def test_gemma_scope_2_transcoders_with_an_affine_part(tmp_path: Path) -> None:
    p = parts()
    folder = write.gemma_scope_2(
        tmp_path / "layer_5",
        p,
        skip=True,
        hf_hook_point_in="model.layers.5.pre_feedforward_layernorm.output",
        hf_hook_point_out="model.layers.5.post_feedforward_layernorm.output",
    )
    sae = load_sae(folder)
    assert (sae.reads.tap, sae.writes.tap) == ((5, "mlp_in"), (5, "mlp_add"))
    _check_formula(sae, p, _jumprelu, skip=p["W_skip"])


def test_llama_scope_has_one_threshold_in_units_of_rows(tmp_path: Path) -> None:
    p = parts()
    folder = write.llama_scope(tmp_path / "Llama3_1-8B-Base-L7R-8x", p, 0.2, 7.0)
    sae = load_sae(folder)
    scale = D_IN**0.5 / 7.0
    _check_formula(
        sae, p | {"threshold": torch.tensor(0.2 * scale)}, _jumprelu, scale=scale
    )
    assert sae.reads.tap == (7, "post_block")


def test_llama_scope_r1_has_logarithms_of_thresholds(tmp_path: Path) -> None:
    p = parts()
    sae = load_sae(write.llama_scope_r1(tmp_path / "L3R", p, 5.0))
    _check_formula(sae, p, _jumprelu, scale=D_IN**0.5 / 5.0)
    assert (sae.layout, sae.reads.tap) == ("llama_scope", (3, "post_block"))


def test_qwen_scope_is_transposed_and_named_by_its_repository(tmp_path: Path) -> None:
    p = parts()
    repository = tmp_path / f"SAE-Res-Qwen3-1.7B-Base-W32K-L0_{K}"
    sae = load_sae(write.qwen_scope(repository, p))
    _check_formula(sae, p, _topk)
    assert (sae.reads.tap, sae.model) == ((5, "post_block"), "Qwen/Qwen3-1.7B-Base")
    with pytest.raises(ValueError, match=r"L0_50 \(parameter"):
        load_sae(write.qwen_scope(tmp_path / "elsewhere", p))


@pytest.mark.parametrize("activation", ["topk", "groupmax"])
def test_sparsify_selects_after_relu(tmp_path: Path, activation: str) -> None:
    p = parts()
    folder = write.sparsify(tmp_path / "layers.6", p, activation=activation)
    sae = load_sae(folder)
    formula = _topk if activation == "topk" else _groupmax
    _check_formula(sae, p, formula, subtracts=True)
    assert sae.reads.tap == (6, "post_block")


def test_sparsify_transcoders_subtract_nothing(tmp_path: Path) -> None:
    p = parts()
    folder = tmp_path / "gpt_neox.layers.2.mlp"
    sae = load_sae(write.sparsify(folder, p, skip=True, transcode=True))
    assert (sae.reads.tap, sae.writes.tap) == ((2, "mlp_in"), (2, "mlp_out"))
    _check_formula(sae, p, _topk, skip=p["W_skip"].T)


def _biases(p: Parts, **others: torch.Tensor) -> Parts:
    return linear(p) | {"encoder.bias": p["b_enc"], **others}


_GATES = {"r_mag": "r_mag", "mag_bias": "b_mag", "gate_bias": "b_gate"}
_ONE = {"threshold": torch.tensor(0.4), "k": torch.tensor(K, dtype=torch.int32)}
DICTIONARIES: dict[str, tuple[Callable[[Parts], Parts], Formula, bool]] = {
    "AutoEncoder": (lambda p: _biases(p, bias=p["b_dec"]), _standard, True),
    "AutoEncoderNew": (
        lambda p: _biases(p, **{"decoder.bias": p["b_dec"]}),
        _standard,
        False,
    ),
    "GatedAutoEncoder": (
        lambda p: (
            linear(p)
            | {"decoder_bias": p["b_dec"]}
            | {theirs: p[name] for theirs, name in _GATES.items()}
        ),
        _gated,
        True,
    ),
    "JumpReluAutoEncoder": (
        lambda p: chosen(p, *BASE, "threshold"),
        _jumprelu,
        False,
    ),
    "AutoEncoderTopK": (lambda p: _biases(p, b_dec=p["b_dec"], **_ONE), _topk, True),
    "BatchTopKSAE": (lambda p: _biases(p, b_dec=p["b_dec"], **_ONE), _jumprelu, True),
    "MatryoshkaBatchTopKSAE": (lambda p: chosen(p, *BASE) | _ONE, _jumprelu, True),
}
"""By class: its tensors, its formula, and whether b_dec is subtracted from rows."""


@pytest.mark.parametrize("kind", DICTIONARIES)
def test_dictionary_learnings_classes(tmp_path: Path, kind: str) -> None:
    tensors_of, formula, subtracts = DICTIONARIES[kind]
    p = parts()
    folder = tmp_path / "trainer_0"
    sae = load_sae(write.dictionary_learning(folder, tensors_of(p), kind))
    if "Batch" in kind:
        p |= chosen(_ONE, "threshold")
    _check_formula(sae, p, formula, subtracts=subtracts)
    assert (sae.reads.tap, sae.model) == ((2, "post_block"), "org/model")


def test_goodfires_file_names_model_and_layer(tmp_path: Path) -> None:
    p = parts()
    sae = load_sae(write.goodfire(tmp_path / "goodfire", p))
    _check_formula(sae, p, _standard)
    assert sae.reads.tap == (19, "post_block")
    assert sae.model == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_file_inside_stands_for_its_folder(tmp_path: Path) -> None:
    folder = write.sparsify(tmp_path / "layers.1", parts())
    assert load_sae(folder / "sae.safetensors").layout == "sparsify"


def test_weights_keep_the_dtype_of_the_file(tmp_path: Path) -> None:
    p = {name: tensor.bfloat16() for name, tensor in parts().items()}
    sae = load_sae(write.sparsify(tmp_path / "layers.1", p))
    assert (sae.w_enc.dtype, sae.w_dec.dtype) == (torch.bfloat16,) * 2
    assert (sae.b_enc.dtype, sae.b_dec.dtype) == (torch.float32,) * 2


@pytest.mark.parametrize(
    ("exact", "hook"),
    [("post_feedforward_layernorm.output", "mlp_add"), ("mlp.unknown", None)],
)
def test_an_exact_name_that_is_unknown_is_no_vaguer_one(
    tmp_path: Path, exact: str, hook: str | None
) -> None:
    """Gemma Scope's SAEs of MLPs are behind a norm, as the exact name says."""
    said = {
        "hook_name": "blocks.4.hook_mlp_out",
        "hf_hook_name": f"model.layers.4.{exact}",
    }
    folder = write.saelens(tmp_path / "sae", chosen(parts(), *BASE), metadata=said)
    sae = load_sae(folder)
    assert sae.reads.tap == (hook and (4, hook))
    assert sae.reads.name == said["hf_hook_name"]
    assert load_sae(folder, (4, "post_attn")).reads.tap == (4, "post_attn")
