# SPDX-License-Identifier: Apache-2.0
"""Patching: where does the model keep "France", and which heads move it?"""

from real import model

from vllm.patching import patch_sweep

CLEAN, CORRUPT = "The capital of France is", "The capital of Japan is"
ASKED = {"answer": " Paris", "foil": " Tokyo", "metric": "recovered"}


def main(llm):
    result = patch_sweep(llm, CLEAN, CORRUPT, **ASKED)
    print(f"{'layer':6}" + "".join(f"{token:>9}" for token in result.tokens))
    for layer, row in zip(result.layers, result.values["post_block"], strict=True):
        if layer % 4 == 1:
            print(f"{layer:<6}" + "".join(f"{value:>9.2f}" for value in row))
    print(f"noise floor {result.noise_floor:.0e}")
    last = {**ASKED, "hooks": "z", "heads": "all", "positions": [-1]}
    for cell in patch_sweep(llm, CLEAN, CORRUPT, **last).top(3):
        print(f"head {cell.head} of layer {cell.layer} moves {cell.value:.2f}")


if __name__ == "__main__":
    main(model(hook_points=["z"]))
