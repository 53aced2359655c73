# SPDX-License-Identifier: Apache-2.0
"""Measures the prefix cache hits of a shared prompt, by kind of steering.

Requests with one long shared prompt and a short individual question are sent one after
another, and their cached prompt tokens are counted. The first request of each kind
computes the shared part, so the best rate is slightly below that part's share.

    python benchmarks/prefix_hits.py --out benchmarks/results/DATE-prefix-hits-cpu.json

Kinds: none; `decode`: a different vector per request at generated tokens; `prompt`: one
vector at all tokens for all requests; `question`: a different vector per request at its
question's tokens; `own`: a different vector per request at all tokens.
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
    """The steering fields of a request of this kind."""
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
    """The fraction of prompt tokens that were cached, over all requests."""
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
