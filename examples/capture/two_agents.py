# SPDX-License-Identifier: Apache-2.0
"""Two agents talk; how alike their activations are, turn by turn and layer by layer.

python examples/capture/two_agents.py

Both are the same model with other instructions. Before each turn the row of the last
token is captured at every layer. The table has the cosine between the two agents' rows
of the same turn, less the mean over all turns: rows of one model are alike whatever
they say.
"""

import argparse
from pathlib import Path

import torch
from small import DEMO_MODEL, small_engine

from vllm import LLM, SamplingParams

AGENTS = {"A": "You had a happy childhood.", "B": "Everything went wrong today."}
OPENING = "How was the weather?"
PARAMS = SamplingParams(
    max_tokens=24,
    temperature=0,
    capture={"inline": {"hooks": {"post_block": "all"}, "positions": {"last": 1}}},
)


def talk(llm: LLM, turns: int) -> tuple[list[tuple[str, str]], torch.Tensor]:
    """A conversation, and its rows, `[agents, turns, layers, hidden_size]`."""
    said: list[tuple[str, str]] = []
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in AGENTS}
    heard = dict.fromkeys(AGENTS, OPENING)
    history = {
        name: [{"role": "system", "content": text}] for name, text in AGENTS.items()
    }
    for _ in range(turns):
        for name, other in zip(AGENTS, reversed(AGENTS)):
            history[name].append({"role": "user", "content": heard[name]})
            (output,) = llm.chat(history[name], PARAMS, use_tqdm=False)
            answer = output.outputs[0].text.strip()
            payload = output.capture_results["inline"].payload
            taps = sorted(payload)
            rows[name].append(torch.stack([payload[tap][-1].float() for tap in taps]))
            history[name].append({"role": "assistant", "content": answer})
            said.append((name, answer))
            heard[other] = answer
    return said, torch.stack([torch.stack(rows[name]) for name in AGENTS])


def cosines(rows: torch.Tensor) -> torch.Tensor:
    """The cosine of the two agents' rows, `[turns, layers]`, less the mean of all."""
    centred = rows - rows.mean(dim=(0, 1), keepdim=True)
    return torch.nn.functional.cosine_similarity(centred[0], centred[1], dim=-1)


def show(llm: LLM, turns: int) -> None:
    """Let them talk, and print what they said and how alike they were."""
    said, rows = talk(llm, turns)
    for name, text in said:
        print(f"{name}: {text}")
    found = cosines(rows)
    print("\nturn " + "".join(f"layer {n:<2}" for n in range(found.shape[1])))
    for turn, values in enumerate(found):
        print(f"{turn:4} " + "".join(f"{float(value):8.2f}" for value in values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--turns", type=int, default=4)
    args = parser.parse_args()
    show(small_engine(args.model, "inline"), args.turns)
