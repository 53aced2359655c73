# SPDX-License-Identifier: Apache-2.0
"""The engines of `readouts.py`: one without readouts, and one with them.

Each runs in a process of its own and imports only what its environment has.
"""

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.harness.delivery_sides import staging_bytes
from benchmarks.harness.llamas import MODELS, model_folder

REQUESTS, PROMPT = 32, 256
LONG_REQUESTS, LONG_PROMPT = 8, 4096
FEATURES, TINY_FEATURES = 65_536, 512
STEPS_AT_START, STEPS_AT_END = 12, 4
"""Steps of a batch that are not timed: operations are recorded during the first."""


def middle_layer(model: str) -> int:
    """The layer that probes and the SAE read."""
    return MODELS[model]["num_hidden_layers"] * 3 // 8


class Engine:
    """An offline engine with dummy weights."""

    def __init__(self, role: str, settings: Mapping[str, Any]) -> None:
        """Start it; `on` has readouts, with modules in `settings["folder"]`."""
        from vllm import LLM

        self._model = settings["model"]
        chosen: dict[str, Any] = {"enforce_eager": settings["eager"]}
        if settings["device"] == "cuda":
            # Both start at once, so free memory cannot be measured.
            chosen["kv_cache_memory_bytes"] = int(settings["kv_gib"] * (1 << 30))
            chosen["gpu_memory_utilization"] = 0.4
        if settings["vocab"]:
            chosen["hf_overrides"] = {"vocab_size": settings["vocab"]}
        if role == "on":
            folder = Path(settings["folder"])
            write_modules(folder, self._model)
            chosen |= _modules(folder)
            if settings["device"] == "cuda":
                chosen["capture_staging_bytes"] = staging_bytes(MODELS[self._model])
        begin = time.perf_counter()
        self._llm = LLM(
            model=model_folder(self._model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4608,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
            **chosen,
        )
        self.start_seconds = time.perf_counter() - begin

    def seconds(
        self,
        tokens: int,
        readouts: Mapping[str, Any] | None = None,
        reading: int = 0,
        is_long: bool = False,
    ) -> float:
        """Time one batch.

        Args:
            tokens: to generate by each request.
            readouts: of the first `reading` requests.
            reading: how many requests have readouts.
            is_long: whether prompts have 4,096 tokens instead of 256.

        """
        return self._generate(tokens, readouts, reading, is_long)[0]

    def steps(
        self,
        tokens: int,
        readouts: Mapping[str, Any] | None = None,
        reading: int = 0,
    ) -> list[float]:
        """Seconds between the outputs of consecutive steps of a batch, as the caller
        receives them. Those in which prompts are computed or requests end are left out.
        """
        engine = self._llm.llm_engine
        step, times = engine.step, []

        def timed() -> Any:
            found = step()
            times.append(time.perf_counter())
            return found

        engine.step = timed
        try:
            self._generate(tokens, readouts, reading)
        finally:
            del engine.step  # Its class has the method.
        own = times[STEPS_AT_START : tokens - STEPS_AT_END]
        return [after - before for before, after in pairwise(own)]

    def moved(
        self, readouts: Mapping[str, Any], reading: int, taps: int
    ) -> dict[str, float]:
        """Bytes of results over the bytes of the rows that they are computed from."""
        _, outputs = self._generate(16, readouts, reading)
        found = [one for o in outputs for one in (o.readouts or {}).values()]
        if failed := [one.error for one in found if one.error]:
            raise RuntimeError(failed[0])
        size = sum(array.nbytes for one in found for array in one.arrays.values())
        rows = sum(len(one.positions) for one in found) * taps
        return {"bytes_of_rows": size / (2 * MODELS[self._model]["hidden_size"] * rows)}

    def errors(self) -> dict[str, float]:
        """Largest relative errors of results that follow from the engine's own rows."""
        import numpy as np

        at = {"hooks": {"post_block": [middle_layer(self._model)]}, "positions": "all"}
        asked = {
            "rows": {"kind": "rows", **at},
            "norm": {"kind": "norm", **at},
            "mean": {"kind": "rows", "reduce": "mean", **at},
        }
        errors = {"norm": 0.0, "mean": 0.0}
        for output in self._generate(16, asked, REQUESTS)[1]:
            found = output.readouts
            rows = np.asarray(found["rows"]["rows"], np.float32)[:, 0]
            if len(rows) != PROMPT + 15:
                raise RuntimeError(f"{len(rows)} rows: {found['rows'].error}")
            norms, mean = np.linalg.norm(rows, axis=1), rows.mean(0)
            gaps = np.abs(found["norm"]["norm"][:, 0] - norms) / norms
            away = np.linalg.norm(found["mean"]["rows"][0] - mean)
            errors["norm"] = max(errors["norm"], float(gaps.max()))
            errors["mean"] = max(errors["mean"], float(away / np.linalg.norm(mean)))
        return errors

    def _generate(
        self,
        tokens: int,
        readouts: Mapping[str, Any] | None,
        reading: int,
        is_long: bool = False,
    ) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        count, length = (LONG_REQUESTS, LONG_PROMPT) if is_long else (REQUESTS, PROMPT)
        prompts: Any = [
            {"prompt_token_ids": [(7 * i + 13 * j) % 31000 + 8 for j in range(length)]}
            for i in range(count)
        ]
        common = {"max_tokens": tokens, "temperature": 0.0, "detokenize": False}
        params = [
            SamplingParams(
                **common,
                ignore_eos=True,
                **({"readouts": readouts} if number < reading else {}),
            )
            for number in range(count)
        ]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, outputs


def _modules(folder: Path) -> dict[str, Any]:
    return {
        "readout_modules": {
            name: str(folder / f"{name}.safetensors") for name in ("one", "many")
        },
        "sae": {"features": str(folder / "sae")},
    }


def write_modules(folder: Path, model: str) -> None:
    """Write a probe, 256 probes and an SAE with random weights."""
    import torch
    from safetensors.torch import save_file

    from vllm.v1.readouts.modules import save_probe

    width, layer = MODELS[model]["hidden_size"], middle_layer(model)
    for name, count in (("one", 1), ("many", 256)):
        vectors = torch.randn(count, width)
        save_probe(folder / f"{name}.safetensors", vectors, layer=layer)
    sae, features = folder / "sae", FEATURES if width >= 1024 else TINY_FEATURES
    sae.mkdir()
    weight = torch.randn(width, features, dtype=torch.bfloat16)
    tensors = {
        "W_enc": weight,
        "W_dec": weight.T.contiguous(),
        "b_enc": torch.zeros(features, dtype=torch.bfloat16),
        "b_dec": torch.zeros(width, dtype=torch.bfloat16),
        "threshold": torch.full((features,), 0.5, dtype=torch.bfloat16),
    }
    save_file(tensors, sae / "sae_weights.safetensors")
    config = {
        "architecture": "jumprelu",
        "apply_b_dec_to_input": False,
        "hook_name": f"blocks.{layer}.hook_resid_post",
    }
    (sae / "cfg.json").write_text(json.dumps(config))
