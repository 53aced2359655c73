# SPDX-License-Identifier: Apache-2.0
"""vllm-activation-capture's scripts and formulas, without the package."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.worker_alone import WorkerAlone
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.check import run as check
from vllm.interop.activation_capture import analysis, tools
from vllm.interop.activation_capture.consumer import DeviceEncoder
from vllm.interop.activation_capture.encoding import (
    Encoding,
    dequantize,
    orthonormal_basis,
    restore,
)
from vllm.interop.activation_capture.variables import consumer_of
from vllm.v1.capture import capabilities
from vllm.v1.capture.engine_args import consumers_of_variables
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.residual.spans import OPEN_END

ENGINE = {
    "max_model_len": 128,
    "enforce_eager": True,
    "dtype": "float32",
    "gpu_memory_utilization": 0.2,
}
PROMPTS = ["Anna went home.", "The dog was here and there and there."]


@pytest.fixture(scope="module")
def llm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """An engine as a script creates it, with its variables and worker class."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ACT_CAPTURE", "1")
        patch.setenv("VLLM_ACT_MODE", "full8")
        patch.setenv("VLLM_ACT_OUTDIR", str(tmp_path_factory.mktemp("acts")))
        patch.setenv("VLLM_ACT_HIDDEN_SIZE", "64")
        opened = LLM(
            str(model),
            worker_cls="vllm_capture.gpu_worker_capture.WorkerCapture",
            capture_consumers=["inline"],
            **ENGINE,
        )
    yield opened
    opened.llm_engine.engine_core.shutdown()


@pytest.mark.e2e
def test_files_hold_every_token_of_every_layer(llm: LLM, model: Path) -> None:
    from transformers import AutoModelForCausalLM
    from vllm_capture.analysis import ActivationLoader, quick_load

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for output in llm.generate(PROMPTS, params):
        manifest = output.capture_results["activation_capture"].payload
        assert output.metrics.extras == {"activation_manifest": manifest}
        folder = Path(manifest["output_dir"])
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        sequence = manifest["sequences"]["0"]
        assert sequence["prompt_len"] == len(output.prompt_token_ids)
        assert sequence["total_len"] == len(tokens)
        assert sequence["token_ids"] == tokens
        assert manifest["mode"] == "full8"
        with torch.no_grad():
            states = reference(torch.tensor([tokens]), output_hidden_states=True)
        for layer in range(2):  # the library normalizes the last layer's output
            acts = quick_load(folder.parent, folder.name, layer=layer)
            expected = states.hidden_states[layer + 1][0].numpy()
            span = expected.max(axis=0) - expected.min(axis=0)
            # Half a step of 256 values per dimension, and float32's rounding.
            assert np.all(np.abs(acts - expected) <= span / 255 / 2 + 1e-4)
            assert acts.shape == tuple(sequence["layers"][str(layer)]["shape"])
        loader = ActivationLoader(folder.parent, mode="full8")
        assert folder.name in loader.list_requests()
        loaded = loader.load_request(folder.name, reconstruct=True)
        assert set(loaded[0]) == {0, 1, 2}
        assert set(loader.compute_layer_statistics(loaded[0])[0]) == {
            "mean",
            "std",
            "min",
            "max",
            "norm",
        }
        same = loader.compute_similarity(loaded[0][0], loaded[0][0])
        assert same == pytest.approx(1.0)


@pytest.mark.e2e
def test_samples_are_sequences_of_one_request(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1, seed=3, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[:1], params)
    manifests = output.capture_results["activation_capture"].payload
    assert sorted(manifests) == [0, 1]
    (folder,) = {manifest["output_dir"] for manifest in manifests.values()}
    names = {path.name for path in Path(folder).iterdir()}
    assert names == {
        f"seq{sample}_layer{layer}_rank0.npz" for sample in (0, 1) for layer in range(3)
    }


def rows(count: int = 20, width: int = 32) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)) * 3 + 5


def test_a_value_is_within_half_a_step_of_its_scale() -> None:
    for per_dim in (True, False):
        arrays = Encoding(mode="full8", per_dim_scale=per_dim).encode(rows())
        assert arrays["q"].dtype == np.uint8
        apart = np.abs(dequantize(arrays) - rows().numpy())
        assert np.all(apart <= arrays["scale"] * 0.501)
        assert arrays["scale"].shape == ((1, 32) if per_dim else (20, 1))


def test_rows_of_one_value_are_exact() -> None:
    for value in (0.0, -3.5, 1e-30, 7e4):
        constant = torch.full((3, 4), value)
        arrays = Encoding(mode="full8").encode(constant)
        np.testing.assert_allclose(dequantize(arrays), constant.numpy(), rtol=1e-6)


def test_a_row_that_is_not_finite_becomes_nan_and_no_other() -> None:
    spoilt = rows()
    spoilt[4, 7] = float("nan")
    arrays = Encoding(mode="full8", per_dim_scale=False).encode(spoilt)
    bad = np.isnan(dequantize(arrays)).any(axis=1)
    assert bad.tolist() == [row == 4 for row in range(20)]


def test_the_basis_is_orthonormal_and_depends_on_nothing_but_its_seed() -> None:
    basis = orthonormal_basis(40, 8, 1)
    assert np.allclose(basis.T @ basis, np.eye(8), atol=1e-5)
    orthonormal_basis.cache_clear()
    assert np.array_equal(orthonormal_basis(40, 8, 1), basis)
    assert not np.allclose(orthonormal_basis(40, 8, 2), basis)


def test_coordinates_keep_what_the_subspace_has() -> None:
    whole = Encoding(mode="rp8", rp_k=64).encode(rows())
    assert whole["q"].shape == (20, 32)  # no more than the width
    few = Encoding(mode="rp8", rp_k=8, rp_seed=5).encode(rows())
    assert few["q"].shape == (20, 8)
    back = restore(few, 32, 5)
    assert back.shape == (20, 32)
    again = Encoding(mode="rp8", rp_k=8, rp_seed=5).encode(torch.from_numpy(back))
    step = float(few["scale"].max())
    assert np.abs(dequantize(again) - dequantize(few)).max() <= 2 * step


def test_topk_keeps_the_largest_magnitudes() -> None:
    arrays = Encoding(mode="topk8", topk_k=5).encode(rows())
    back = restore(arrays, 32, 0)
    wanted = rows().numpy()
    kept = np.take_along_axis(wanted, arrays["indices"].astype(int), axis=1)
    assert (back != 0).sum() <= 20 * 5
    assert np.abs(kept).min(axis=1) == pytest.approx(
        np.sort(np.abs(wanted), axis=1)[:, -5]
    )
    with pytest.raises(ValueError, match="give hidden_size"):
        analysis.reconstruct_activations(arrays, "topk8")


SMALL = {"rp_k": 8, "topk_k": 5}
ENCODED = [
    ("rp8", True, 8 * 4),
    ("rp8", False, 8 + 8),
    ("topk8", True, 5 * 3 + 8),
    ("full8", False, 32 + 8),
]
"""Mode, whether a scale is for a dimension, and the bytes of an encoded row of 32."""


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Both have the same arrays; products may differ by their rounding."""
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        if name in ("q", "values", "indices"):
            apart = found[name].astype(int) - array.astype(int)
            assert np.abs(apart).max(initial=0) <= (1 if name == "q" else 0)
        else:
            np.testing.assert_allclose(found[name], array, rtol=1e-4)


@pytest.mark.parametrize(("mode", "per_dim", "row_bytes"), ENCODED)
def test_the_device_encodes_as_the_host(mode, per_dim, row_bytes) -> None:
    encoding = Encoding(mode=mode, per_dim_scale=per_dim, **SMALL)
    encoder = DeviceEncoder.of(encoding, 32, torch.float32, torch.device("cpu"))
    assert encoder is not None
    assert encoder.width * encoder.dtype.itemsize == row_bytes
    values = rows()
    if mode != "topk8":  # of equal magnitudes, any may be kept
        values[3], values[4] = 0.0, 7.25
    values[5, 2], values[6, 30] = float("nan"), float("-inf")
    values[7] *= 1e-38
    for some in (values, values[:5], values[:0], values.to(torch.bfloat16)[:3]):
        with np.errstate(invalid="ignore"):
            expected = encoding.encode(some)
        assert_same(encoder.arrays(encoder.encode(some)), expected)


def test_rows_that_would_not_become_smaller_are_copied_whole() -> None:
    device = torch.device("cpu")
    for encoding in (
        Encoding(mode="full8"),  # a scale per dimension is known at the end
        Encoding(mode="rp8", rp_k=256),
        Encoding(mode="topk8", topk_k=40),
    ):
        assert DeviceEncoder.of(encoding, 64, torch.bfloat16, device) is None


def captured(folder: Path, **options: object) -> tuple[dict[str, dict], int]:
    """The files of two requests in a worker without a model; bytes delivered."""
    params = {"root": str(folder), **SMALL, **options}
    taps = [(layer, "post_block") for layer in range(2)]
    worker = WorkerAlone(
        json.dumps({"name": "activation_capture", "params": params}),
        layers=2,
        width=32,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(7)
    # No two values of a row have equal magnitudes, of which any might be kept.
    values = torch.rand(2048, 32, generator=generator).argsort(dim=1) - 15.75
    worker._worker._staging.rows[: len(values)] = values
    worker.open(["a", "b"], 6, taps, (0, OPEN_END))
    worker.step(["a"], 0, 4)
    worker.step(["a", "b"], [4, 0], [2, 6])
    for done in range(6, 70):
        worker.step(["a", "b"], done, 1)
    worker.end(["a", "b"], 60)
    worker.answers(2)
    size = worker._worker._lanes["activation_capture"].counters().bytes
    worker.close()
    paths = sorted(folder.glob("req_*/*.npz"))
    found = {f"{path.parent.name}/{path.name}": np.load(path) for path in paths}
    return {name: dict(file) for name, file in found.items()}, size


@pytest.mark.parametrize(("mode", "per_dim", "row_bytes"), ENCODED)
def test_only_encoded_rows_leave_the_device(
    mode, per_dim, row_bytes, tmp_path, monkeypatch
) -> None:
    asked = {"mode": mode, "per_dim_scale": per_dim}
    expected, whole = captured(tmp_path / "host", **asked)
    monkeypatch.setattr(capabilities, "crosses_to_host", lambda device: True)
    found, size = captured(tmp_path / "device", **asked)
    assert len(found) == 4 and list(found) == list(expected)
    for name, file in expected.items():
        assert len(next(iter(file.values()))) == 65
        assert_same(found[name], file)
    assert size * 32 * torch.bfloat16.itemsize == whole * row_bytes


def test_readers_know_tensors_timelines_and_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "req_a"
    folder.mkdir()
    arrays = Encoding(mode="full8").encode(rows())
    np.savez_compressed(folder / "seq0_layer2_rank0.npz", **arrays)
    (folder / "notes.txt").write_text("not an array")
    loader = analysis.ActivationLoader(tmp_path, device="cpu")
    layers = loader.load_request("req_a")[0]
    timeline = loader.create_token_timeline(layers, 2)
    assert torch.is_tensor(timeline) and timeline.shape == (20, 32)
    one, other = timeline[0], timeline[1]
    assert loader.compute_similarity(one, other, "l2") == pytest.approx(
        -float((one - other).norm()), rel=1e-5
    )
    assert loader.compute_similarity(one, other, "correlation") == pytest.approx(
        float(torch.corrcoef(torch.stack([one, other]))[0, 1]), abs=1e-5
    )
    assert analysis.compare_tokens(timeline, timeline, 3, 3) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="layer 0 is missing"):
        analysis.quick_load(tmp_path)
    with pytest.raises(ValueError, match="cosine"):
        loader.compute_similarity(one, other, "dot")
    with pytest.raises(FileNotFoundError, match="req_b"):
        loader.load_request("req_b")
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"mode": "full8"}))
    assert analysis.load_activation_manifest(path) == {"mode": "full8"}


def test_without_the_switch_nothing_is_added() -> None:
    assert consumers_of_variables({}) == []
    assert consumers_of_variables({"VLLM_ACT_CAPTURE": "0"}) == []
    assert consumers_of_variables({"VLLM_ACT_CAPTURE": "off"}) == []
    (added,) = consumers_of_variables({"VLLM_ACT_CAPTURE": "1"})
    assert added["params"]["mode"] == "rp8" and added["params"]["rp_k"] == 256


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("VLLM_ACT_MODE", "svd", "rp8"),
        ("VLLM_ACT_RP_K", "many", "an integer"),
        ("VLLM_ACT_BITS", "4", "8 bits"),
        ("VLLM_ACT_ATTNM", "3", "attention"),
        ("VLLM_ACT_RETURN", "summary", "compute_layer_statistics"),
        ("VLLM_ACT_PER_DIM", "perhaps", "1 or 0"),
        ("VLLM_ACT_LAYERS", "3", "the variables are"),
        ("VLLM_ACT_CAPTURE", "please", "1 or 0"),
    ],
)
def test_what_cannot_be_carried_out_stops_the_start(name, value, message) -> None:
    with pytest.raises(CaptureValidationError, match=message):
        consumer_of({"VLLM_ACT_CAPTURE": "1", name: value})


def test_the_check_says_where_rows_differ(capsys: pytest.CaptureFixture[str]) -> None:
    states = [rows(4, 8) + n for n in range(3)]
    taps = {(0, "pre_attn"): 0, (0, "post_block"): 1, (1, "pre_attn"): 1}
    found = {tap: states[at].clone() for tap, at in taps.items()}
    found[1, "post_block"] = torch.zeros(4, 8)  # the library has no such state
    assert check.verdict(check.compare(found, states), 4, "float32", None) == 0
    assert "OK: 4 tokens at 3 hook points" in capsys.readouterr().out
    found[0, "post_block"] = found[0, "post_block"] * 1.001
    assert check.verdict(check.compare(found, states), 4, "float32", None) == 1
    assert "layer 0 post_block" in capsys.readouterr().out
    found[0, "post_block"] = torch.full((4, 8), float("nan"))
    assert check.verdict(check.compare(found, states), 4, "float32", 10.0) == 1
    with pytest.raises(ValueError, match="Transformers 3"):
        check.compare(found, [*states, states[0]])


@pytest.mark.e2e
def test_the_check_of_a_model_ends_well(
    llm: LLM, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, found = check.capture(llm, check.PROMPT, 4)
    states = check.library_states(EngineArgs(model=str(model)), tokens)
    dtype = check.dtype_of(found)
    assert check.verdict(check.compare(found, states), len(tokens), dtype, None) == 0
    assert "at 5 hook points" in capsys.readouterr().out


def test_the_tools_say_that_nothing_needs_patching(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert tools.patch(["--model", "llama"]) == 0
    assert "llama: nothing needs patching (LlamaDecoderLayer" in capsys.readouterr().out
    assert tools.patch(["--model", "clip"]) == tools.patch(["--model", "nothing"]) == 1
    assert "nothing: no such module" in capsys.readouterr().err
    assert tools.check(["--model", "qwen2"]) == 0
    told = capsys.readouterr().out
    assert "worker: " in told and "qwen2: nothing needs patching" in told


@pytest.mark.parametrize("flags", [["--check"], ["--all"], ["--model", "all"]])
def test_every_model_that_the_tools_know_is_ready(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools.patch(flags) == 0
    assert capsys.readouterr().out.count("nothing needs patching") == len(tools.MODELS)
