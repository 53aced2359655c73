# SPDX-License-Identifier: Apache-2.0
"""Two agents talk; how alike their activations are, turn by turn and layer by layer.

python examples/capture/two_agents.py

Both are one model with other instructions. The table has the cosine of their rows (last
token, before each turn), less the mean over all turns: rows of one model are all alike.
"""

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


def talk(llm: LLM, turns: int) -> torch.Tensor:
    """Print a conversation; returns rows `[agents, turns, layers, hidden_size]`."""
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in AGENTS}
    chats = {name: [{"role": "system", "content": AGENTS[name]}] for name in AGENTS}
    heard = dict.fromkeys(AGENTS, OPENING)
    for _ in range(turns):
        for name, other in zip(AGENTS, reversed(AGENTS)):
            chats[name].append({"role": "user", "content": heard[name]})
            (output,) = llm.chat(chats[name], PARAMS, use_tqdm=False)
            payload = output.capture_results["inline"].payload
            rows[name].append(
                torch.stack([payload[tap][-1] for tap in sorted(payload)])
            )
            heard[other] = output.outputs[0].text.strip()
            chats[name].append({"role": "assistant", "content": heard[other]})
            print(f"{name}: {heard[other]}")
    return torch.stack([torch.stack(rows[name]) for name in AGENTS]).float()


def show(llm: LLM, turns: int) -> None:
    """Let them talk, and print how alike they were."""
    rows = talk(llm, turns)
    rows -= rows.mean(dim=(0, 1), keepdim=True)
    cosines = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=-1)
    print("\nturn " + "".join(f"layer {n:<2}" for n in range(cosines.shape[1])))
    for turn, values in enumerate(cosines):
        print(f"{turn:4} " + "".join(f"{float(value):8.2f}" for value in values))


if __name__ == "__main__":
    show(small_engine(DEMO_MODEL, "inline"), turns=4)
