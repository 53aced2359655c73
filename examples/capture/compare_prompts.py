# SPDX-License-Identifier: Apache-2.0
"""Cosine similarity of prompts and of layers, computed from files of captured rows.

python examples/capture/compare_prompts.py "The old house" "A sunny day"
"""

import argparse
import tempfile
from pathlib import Path

import torch
from small import DEMO_MODEL, small_engine

from vllm import LLM, SamplingParams
from vllm.v1.capture.consumers.filesystem import CaptureStore

PROMPTS = [
    "The old house by the river",
    "The new house by the sea",
    "Dear diary, today",
]


def print_matrix(title: str, names: list[int], matrix: torch.Tensor) -> None:
    """Print a matrix of cosines with labels for rows and columns."""
    print(title + ":\n    " + "".join(f"{name:7}" for name in names))
    for name, row in zip(names, matrix):
        print(f"{name:3} " + "".join(f"{value:7.2f}" for value in row))


def asking(request_id: str) -> SamplingParams:
    """Parameters that generate one token and capture the prompt at every layer."""
    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    capture = {"filesystem": {**spec, "request_id": request_id}}
    return SamplingParams(max_tokens=1, capture=capture)


def show(llm: LLM, folder: str, prompts: list[str]) -> None:
    """Capture the prompts and compare their rows."""
    llm.generate(prompts, [asking(str(number)) for number in range(len(prompts))])
    store = CaptureStore(folder)
    last = max(rows.layer for rows in store.select())
    for layer in (0, last):
        names, matrix = store.request_cosines(layer, "post_block")
        numbers = [int(name) for name in names]
        print_matrix(f"layer {layer}, mean over the prompt", numbers, matrix)
    layers, matrix = store.layer_cosines("0", "post_block")
    print_matrix("layers of prompt 0", layers, matrix)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        show(small_engine(args.model, f"filesystem:root={root}"), root, args.prompts)
