# SPDX-License-Identifier: Apache-2.0
"""Readouts that are replayed as CUDA graphs have the bits of those that are not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.gpu.conftest import OpenEngine
from tests.support.captured import CapturedEngine, prompt
from vllm import SamplingParams
from vllm.v1.readouts.modules import save_probe
from vllm.v1.readouts.worker import recorded
from vllm.v1.readouts.worker.recorded import RecordedSteps

pytestmark = pytest.mark.gpu

WIDTH, FEATURES = 512, 2048
LENGTHS = (5, 17, 33, 40, 61, 90)
TOKENS = (64, 24, 64, 40, 12, 64)
"""Tokens that each request generates: the program changes as requests end."""
READOUTS: dict[str, dict[str, Any]] = {
    "probes": {
        "p": {"kind": "probe", "probe": "one"},
        "q": {"kind": "probe", "probe": "many"},
    },
    "lens": {"lens": {"kind": "lens", "layers": "all", "top_k": 5}},
    "own": {
        "p": {"kind": "probe", "vectors": [[0.5] * WIDTH], "layer": 2},
        "n": {"kind": "norm", "hooks": {"post_block": [1, 2]}},
    },
    "everything": {
        "p": {"kind": "probe", "probe": "one"},
        "lens": {"kind": "lens", "layers": [1, 3], "top_k": 3},
        "f": {"kind": "sae", "sae": "features", "top_k": 8},
    },
}


def modules(folder: Path) -> dict[str, Any]:
    """Write a probe, 64 probes and an SAE, and return the engine's options."""
    torch.manual_seed(0)
    for name, count in (("one", 1), ("many", 64)):
        path = folder / f"{name}.safetensors"
        save_probe(path, torch.randn(count, WIDTH), layer=1)
    weight = torch.randn(WIDTH, FEATURES, dtype=torch.bfloat16)
    tensors = {
        "W_enc": weight,
        "W_dec": weight.T.contiguous(),
        "b_enc": torch.zeros(FEATURES, dtype=torch.bfloat16),
        "b_dec": torch.zeros(WIDTH, dtype=torch.bfloat16),
        "threshold": torch.full((FEATURES,), 0.5, dtype=torch.bfloat16),
    }
    sae = folder / "sae"
    sae.mkdir()
    save_file(tensors, sae / "sae_weights.safetensors")
    (sae / "cfg.json").write_text(
        '{"architecture": "jumprelu", "apply_b_dec_to_input": false, '
        '"hook_name": "blocks.1.hook_resid_post"}'
    )
    named = {name: str(folder / f"{name}.safetensors") for name in ("one", "many")}
    return {"readout_modules": named, "sae": {"features": str(sae)}}


@pytest.fixture(scope="module")
def engine(
    llama: Path, open_engine: OpenEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CapturedEngine]:
    options = modules(tmp_path_factory.mktemp("modules"))
    yield open_engine(llama, reference=object(), **options)


def results(engine: CapturedEngine, readouts: dict[str, Any]) -> list[Any]:
    """Tokens, and by readout the arrays, of each request."""
    params = [
        SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            readouts=readouts,
        )
        for tokens in TOKENS
    ]
    prompts = [prompt(length, seed=70 + length) for length in LENGTHS]
    outputs = engine.run(prompts, params)
    for output in outputs:
        assert all(one.error is None for one in output.readouts.values())
    return [
        (
            list(output.outputs[0].token_ids),
            {
                name: (one.positions, one.arrays)
                for name, one in output.readouts.items()
            },
        )
        for output in outputs
    ]


@pytest.mark.parametrize("name", READOUTS)
def test_recorded_readouts_have_the_same_bits(
    name: str, engine: CapturedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = engine.llm.llm_engine.model_executor.driver_worker
    steps: RecordedSteps = worker.worker.model_runner.residual.readouts.recorded
    monkeypatch.setattr(recorded, "RECORD_AFTER", 1 << 30)
    expected = results(engine, READOUTS[name])
    assert not steps._recordings
    monkeypatch.setattr(recorded, "RECORD_AFTER", 2)
    replayed = 0
    run = RecordedSteps.step

    def counted(self: RecordedSteps, *args: Any) -> Any:
        nonlocal replayed
        found = run(self, *args)
        replayed += found is not None
        return found

    monkeypatch.setattr(RecordedSteps, "step", counted)
    for _ in range(2):  # While graphs are recorded, and when all are.
        found = results(engine, READOUTS[name])
        for (tokens, arrays), (right_tokens, right) in zip(
            found, expected, strict=True
        ):
            assert tokens == right_tokens
            for readout, (positions, own) in arrays.items():
                assert positions == right[readout][0]
                for label, array in own.items():
                    np.testing.assert_array_equal(array, right[readout][1][label])
    assert not steps.failed and steps._recordings
    assert replayed > max(TOKENS), "most steps were not replayed"
    steps.forget()
