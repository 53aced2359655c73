# SPDX-License-Identifier: Apache-2.0
"""The sides of `delivery.py`: processes that deliver rows in different ways.

Each answers requests of the form `{"turn": name, ...}` with seconds and bytes, and
imports only what its own environment has.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.harness import reports
from benchmarks.harness.llamas import MODELS, model_folder

SAMPLING = {"temperature": 0, "ignore_eos": True, "detokenize": False}
FILES = ("packed", "sharded", "safetensors", "ipc", "parquet")
"""Turns whose rows are written to files by the fork's consumers."""


def token_ids(count: int, length: int) -> list[list[int]]:
    """Random prompts, the same ones every time."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return torch.randint(32000, (count, length), generator=draw).tolist()


class Engine:
    """An offline engine: upstream's, the fork's, or upstream's with its connector."""

    def __init__(self, role: str, settings: Mapping[str, Any]) -> None:
        """Start it."""
        from vllm import LLM

        self._settings = settings
        self._folder = Path(settings["folder"]) / role
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = 0
        size = MODELS[settings["model"]]
        chosen: dict[str, Any] = {"enforce_eager": settings["eager"]}
        if settings["device"] == "cuda":
            # Sides start concurrently, so free memory cannot be measured.
            kv_bytes = settings["kv_gib"] * (2.5 if role == "connector" else 1)
            chosen["kv_cache_memory_bytes"] = int(kv_bytes * (1 << 30))
            chosen["gpu_memory_utilization"] = 0.2
        if role == "fork":
            chosen["capture_consumers"] = self._consumers()
            if settings["device"] == "cuda":
                chosen["capture_staging_bytes"] = staging_bytes(size)
        if role == "connector":
            chosen |= self._connector(size["num_hidden_layers"])
        begin = time.perf_counter()
        self._llm = LLM(
            model=model_folder(settings["model"]),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=settings["tensor_parallel"],
            max_model_len=4096,
            max_num_seqs=256,
            enable_prefix_caching=False,
            **chosen,
        )
        self.start_seconds = time.perf_counter() - begin

    def _consumers(self) -> list[Any]:
        arrow = [
            {
                "name": "arrow",
                "instance_name": form,
                "params": {"root": str(self._folder / form), "format": form},
            }
            for form in ("safetensors", "ipc", "parquet")
        ]
        root = str(self._folder / "files")
        files = {"name": "filesystem", "params": {"root": root}}
        return ["inline", files, *arrow]

    def _connector(self, layers: int) -> dict[str, Any]:
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {
                    "hf_config": {
                        # Index of a layer's input; the last index is the output.
                        "eagle_aux_hidden_state_layer_ids": list(range(1, layers + 1))
                    }
                },
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self._folder)},
            },
        }

    def turn(self, name: str, prompts: int, length: int, tokens: int) -> dict[str, Any]:
        """Send all prompts concurrently and time the delivery of their rows."""
        from vllm import SamplingParams

        self._number += 1
        fields = {} if name in ("plain", "connector") else {"capture": self._spec(name)}
        params = SamplingParams(max_tokens=tokens, **SAMPLING, **fields)
        inputs: Any = [{"prompt_token_ids": ids} for ids in token_ids(prompts, length)]
        begin = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        size = self._delivered(name, outputs)
        seconds = time.perf_counter() - begin
        del outputs
        self._clear()
        return {"seconds": seconds, "bytes": size}

    def _spec(self, name: str) -> dict[str, Any]:
        positions = "all" if name == "generated" else "all_prompt"
        spec = {"hooks": {"post_block": "all"}, "positions": positions}
        if name in ("packed", "sharded"):
            tag = f"turn-{self._number}"
            return {"filesystem": {**spec, "layout": name, "tag": tag}}
        if name in FILES:
            return {name: spec}
        return {"inline": spec}

    def _delivered(self, name: str, outputs: Sequence[Any]) -> int:
        if name == "plain":
            return 0
        if name == "connector":
            return sum(_load_connector(output) for output in outputs)
        total = 0
        for output in outputs:
            ((instance, result),) = output.capture_results.items()
            if result.status != "ok":
                raise RuntimeError(f"{name}, {instance}: {result.error}")
            if instance == "inline":
                total += sum(rows.nbytes for rows in result.payload.values())
        return total if total else _bytes_below(self._folder)

    def _clear(self) -> None:
        """Delete the files of a turn, outside the measured time, to limit disk usage.

        Folders are kept, as consumers create some of them only at their start.
        """
        for path in self._folder.rglob("*"):
            with suppress(OSError):
                path.unlink()
        os.sync()

    def memory(self) -> dict[str, Any]:
        """Bytes that this process and its engine use, and what is stated of rows."""
        found = resident()
        capture = getattr(self._llm.llm_engine, "capture", None)
        if capture is not None:
            time.sleep(2)  # Workers report once a second.
            found["stated"] = capture.describe().get("host_memory", [])
        return found


def staging_bytes(size: Mapping[str, int]) -> int:
    """The default of an engine that has the GPU to itself.

    It is a share of the GPU memory that the engine may use, and the engines of this
    benchmark say that they use little, because they start together.
    """
    from vllm.v1.residual.sizes import default_staging_bytes

    # Not asked of torch: once a process has used CUDA, its engines start otherwise.
    mib = float(reports.ask_gpu("memory.total") or 0)
    memory = int(0.92 * mib * (1 << 20))
    layers, width = size["num_hidden_layers"], size["hidden_size"]
    return default_staging_bytes(2 * width, layers, 16384, memory)


def _load_connector(output: Any) -> int:
    """Load a request's hidden states and return their bytes."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import (
        example_hidden_states_connector as connector,
    )

    path = output.kv_transfer_params["hidden_states_path"]
    found = connector.load_hidden_states(path)
    connector.cleanup_hidden_states(path)
    return int(found["hidden_states"].nbytes)


def _bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def resident() -> dict[str, Any]:
    """Memory of this process and its descendants in bytes.

    Memory that several of them share counts once (`Pss`, without files).
    """
    import psutil

    own = psutil.Process()
    total = 0
    for one in (own, *own.children(recursive=True)):
        lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()[1:]
        found = dict(line.split(":", 1) for line in lines)
        total += sum(int(found[f"Pss_{kind}"].split()[0]) for kind in ("Anon", "Shmem"))
    return {"bytes": total << 10}


class Transformers:
    """Hugging Face's `output_hidden_states`, a prompt at a time."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Make the model on the device; its weights are random."""
        import torch
        import transformers

        begin = time.perf_counter()
        folder = Path(model_folder(settings["model"]))
        config = transformers.LlamaConfig(
            **json.loads((folder / "config.json").read_text())
        )
        self._device = settings["device"]
        with torch.device(self._device):
            self._model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16
            ).eval()
        self._host: Any = None
        self.start_seconds = time.perf_counter() - begin

    def turn(self, name: str, prompts: int, length: int, tokens: int) -> dict[str, Any]:
        """All layers' outputs of each prompt, in pinned host memory."""
        import torch

        begin = time.perf_counter()
        total = 0
        with torch.inference_mode():
            for ids in token_ids(prompts, length):
                given = torch.tensor([ids], device=self._device)
                out = self._model.model(given, output_hidden_states=True)
                states = torch.stack(out.hidden_states[1:])
                pin = self._device == "cuda"
                host = torch.empty_like(states, device="cpu", pin_memory=pin)
                host.copy_(states)
                total += host.nbytes
        return {"seconds": time.perf_counter() - begin, "bytes": total}

    def memory(self) -> dict[str, Any]:
        """Resident memory of this process in bytes."""
        return resident()


class PlainWriter:
    """One thread that appends the same number of bytes to one file."""

    start_seconds = 0.0

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Use the folder that the consumers write to."""
        self._folder = Path(settings["folder"]) / "plain"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._row_bytes = 2 * MODELS[settings["model"]]["hidden_size"]
        self._layers = MODELS[settings["model"]]["num_hidden_layers"]

    def turn(self, name: str, prompts: int, length: int, tokens: int) -> dict[str, Any]:
        """Write as many bytes as the prompts' rows have, one request at a time."""
        block = os.urandom(1 << 20) * max(
            self._layers * length * self._row_bytes >> 20, 1
        )
        path = self._folder / "plain.bin"
        begin = time.perf_counter()
        with open(path, "wb", buffering=0) as file:
            for _ in range(prompts):
                file.write(block)
        seconds = time.perf_counter() - begin
        path.unlink()
        os.sync()
        return {"seconds": seconds, "bytes": prompts * len(block)}

    def memory(self) -> dict[str, Any]:
        """Resident memory of this process in bytes."""
        return resident()


def open_side(role: str, settings: Mapping[str, Any]) -> Any:
    """The side of this name."""
    if role == "transformers":
        return Transformers(settings)
    if role == "disk":
        return PlainWriter(settings)
    return Engine(role, settings)
