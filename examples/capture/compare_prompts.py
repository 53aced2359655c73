# SPDX-License-Identifier: Apache-2.0
"""How alike prompts and layers are inside the model, from files of captured rows.

python examples/capture/compare_prompts.py "The old house" "A sunny day"
"""

import argparse
import tempfile
from pathlib import Path

import torch
from small import DEMO_MODEL, small_engine

from vllm import SamplingParams
from vllm.v1.capture.consumers.filesystem import CaptureStore

PROMPTS = [
    "The old house by the river",
    "The new house by the sea",
    "Dear diary, today",
]


def show(title: str, names: list[int], matrix: torch.Tensor) -> None:
    """Print a matrix with its names."""
    print(title + ":\n    " + "".join(f"{name:7}" for name in names))
    for name, row in zip(names, matrix):
        print(f"{name:3} " + "".join(f"{value:7.2f}" for value in row))


def asking(request_id: str) -> SamplingParams:
    """One token, and every layer at every position of the prompt."""
    spec = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    capture = {"filesystem": {**spec, "request_id": request_id}}
    return SamplingParams(max_tokens=1, capture=capture)


def main() -> None:
    """Capture the prompts and compare what was captured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        llm = small_engine(args.model, f"filesystem:root={root},default_layout=sharded")
        params = [asking(str(number)) for number in range(len(args.prompts))]
        llm.generate(args.prompts, params)
        store = CaptureStore(root)
        last = max(rows.layer for rows in store.select())
        for layer in (0, last):
            names, matrix = store.request_cosines(layer, "post_block")
            numbers = [int(name) for name in names]
            show(f"layer {layer}, mean over the prompt", numbers, matrix)
        layers, matrix = store.layer_cosines("0", "post_block")
        show("layers of prompt 0", layers, matrix)


if __name__ == "__main__":
    main()
