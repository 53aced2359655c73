# SPDX-License-Identifier: Apache-2.0
"""How much of a shared prompt is found in the prefix cache, by kind of steering.

Requests with one long prompt and a short question of their own come one after another;
each asks how many of its prompt's tokens were cached. The first of each kind computes
the shared part, so the best rate is a little below the shared part's share.

    python benchmarks/prefix_hits.py --out benchmarks/results/DATE-prefix-hits-cpu.json

Kinds: none; `decode`: vectors at generated tokens, another for each request; `prompt`:
one vector at all tokens for all requests; `question`: a vector of each request's own at
its question's tokens; `own`: a vector of each request's own at all tokens.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `benchmarks`

from benchmarks.harness import reports

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

MODEL = Path(__file__).parents[1] / "examples" / "demo_model" / "weights"
BLOCK = 32
SHARED, QUESTION, REQUESTS = 480, 8, 64


def steering(kind: str, seed: int, width: int) -> dict[str, Any]:
    """What a request of this kind says of its steering."""
    import numpy as np

    def spec(seed: int, **more: Any) -> dict[str, Any]:
        vector = np.random.default_rng(seed).normal(size=width).astype(np.float32)
        return {"post_block": {2: {"vector": vector, "scale": 0.1, **more}}}

    return {
        "none": {},
        "decode": {"decode_steering_vectors": spec(seed)},
        "prompt": {"steering_vectors": spec(0)},
        "question": {
            "prefill_steering_vectors": spec(seed, positions={"last": QUESTION})
        },
        "own": {"steering_vectors": spec(seed)},
    }[kind]


def rate(llm: Any, kind: str, width: int) -> float:
    """The share of prompt tokens that came from the cache, over all requests."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    cached = total = 0
    for request in range(REQUESTS):
        shared = [(7 * n) % 900 + 20 for n in range(SHARED)]
        own = [(11 * n + 3 * request) % 900 + 20 for n in range(QUESTION)]
        params = SamplingParams(
            max_tokens=2, temperature=0.0, **steering(kind, request + 1, width)
        )
        prompt = {"prompt_token_ids": shared + own}
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        cached += output.num_cached_tokens
        total += SHARED + QUESTION
    return cached / total


def main() -> None:
    """Measure each kind and write the rates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    from vllm import LLM

    load = os.getloadavg()
    llm = LLM(
        str(MODEL),
        enable_steering=True,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_model_len=512,
        dtype="float32",
    )
    width = llm.llm_engine.vllm_config.model_config.get_hidden_size()
    kinds = ("none", "decode", "prompt", "question", "own")
    rates = {kind: round(rate(llm, kind, width), 4) for kind in kinds}
    found = {
        "command": "python benchmarks/prefix_hits.py",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "what": "share of prompt tokens found in the prefix cache",
        "requests": REQUESTS,
        "shared_tokens": SHARED,
        "own_tokens": QUESTION,
        "block_size": BLOCK,
        "possible": round(
            (SHARED // BLOCK * BLOCK) * (REQUESTS - 1) / (SHARED + QUESTION) / REQUESTS,
            4,
        ),
        "rates": rates,
        "machine": reports.machine(load),
    }
    print(json.dumps(found, indent=1))
    reports.write(found, out)


if __name__ == "__main__":
    main()
