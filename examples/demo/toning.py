# SPDX-License-Identifier: Apache-2.0
"""A tone vector: extracted from captured rows, registered, and applied.

Legend: N stories of each tone, H width of the stream.
"""

import base64
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from vllm.steering.directions import Direction, direction
from vllm.v1.capture.consumers.filesystem import read_request

DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
sys.path.insert(0, str(DEMO_MODEL))  # the examples are scripts

from generate_text import documents, neutral_openings  # noqa: E402
from tone import tone_score  # noqa: E402

TAG = "tone"
HOOK, LAYER = "post_block", 2
NUM_PAIRS = 24
NUM_PROMPTS, NUM_SAMPLES, NUM_TOKENS = 12, 4, 48
COEFFICIENTS = (-1.0, -0.5, 0.0, 0.5, 1.0)
MODULES = {"cheerful": 1.0, "gloomy": -1.0}
"""The named modules, with the factor of the vector."""


def stories(count: int) -> dict[str, list[str]]:
    """Stories of each tone, in equal numbers."""
    found: dict[str, list[str]] = {"cheerful": [], "gloomy": []}
    for document in documents(seed=5):
        if min(map(len, found.values())) == count:
            break
        if len(found[document.tone]) < count:
            found[document.tone].append(document.text)
    return found


@dataclass(frozen=True, slots=True)
class Steerer:
    """An HTTP client for steering on one server."""

    http: httpx.Client
    model: str
    key: str

    def extract(self, captures: Path) -> Direction:
        """Extract the direction from gloomy to cheerful, from rows captured now."""
        means = []
        for tone, texts in stories(NUM_PAIRS).items():
            names = [f"{tone}-{number}" for number in range(len(texts))]
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(self._capture, names, texts))
            means.append(np.stack([_mean_row(captures, name) for name in names]))
        return direction(*means)

    def _capture(self, name: str, text: str) -> None:
        """Capture the rows of a text to files, at one layer and hook point."""
        spec = {
            "tag": TAG,
            "request_id": name,
            "hooks": {HOOK: [LAYER]},
            "positions": "all_prompt",
            "layout": "packed",
        }
        capture = {"capture": {"filesystem": spec}, "capture_wait": True}
        reply = self._complete(prompt=text, max_tokens=1, **capture)
        result = reply["capture_results"]["filesystem"]
        assert result["status"] == "ok", result

    def register(self, found: Direction) -> dict[str, float]:
        """Register the modules; returns the norm of each vector."""
        norms = {}
        for name, scale in MODULES.items():
            answer = self.http.post(
                "/v1/steering/modules/register",
                json={"name": name, "vectors": packed(found.vector, scale)},
                headers={"Authorization": f"Bearer {self.key}"},
            )
            answer.raise_for_status()
            said = answer.json()["vectors"][HOOK][str(LAYER)]
            norms[name] = said["norm"]
        return norms

    def told(self, prompts: Sequence[str], name: str | None) -> list[str]:
        """Generate a story for each prompt, steered by a named module."""
        steering = {} if name is None else {"steering_name": name}
        reply = self._complete(
            prompt=list(prompts), max_tokens=NUM_TOKENS, temperature=0, **steering
        )
        return [choice["text"] for choice in reply["choices"]]

    def score(self, found: Direction, coefficient: float) -> float:
        """The mean tone of stories that are steered by the scaled vector."""
        steering = {"steering_vectors": packed(found.vector, coefficient)}
        reply = self._complete(
            prompt=neutral_openings(NUM_PROMPTS, seed=11),
            n=NUM_SAMPLES,
            max_tokens=NUM_TOKENS,
            temperature=1.0,
            seed=0,
            **(steering if coefficient else {}),
        )
        scores = [tone_score(choice["text"]) for choice in reply["choices"]]
        return sum(scores) / len(scores)

    def _complete(self, **fields: Any) -> dict[str, Any]:
        answer = self.http.post(
            "/v1/completions", json={"model": self.model, **fields}, timeout=180
        )
        answer.raise_for_status()
        reply: dict[str, Any] = answer.json()
        return reply


def _mean_row(captures: Path, name: str) -> np.ndarray:
    """The mean row over a story's tokens, `[H]`."""
    rows = read_request(captures, TAG, name)[LAYER, HOOK]
    return rows.double().mean(dim=0).numpy()


def packed(vector: np.ndarray, scale: float) -> dict[str, Any]:
    """A vector as a request's packed form."""
    return {
        HOOK: {
            "dtype": "float32",
            "shape": [1, len(vector)],
            "layer_indices": [LAYER],
            "data": base64.b64encode(vector.astype("<f4").tobytes()).decode(),
            "scales": [scale],
        }
    }


def rises(scores: Sequence[float]) -> bool:
    """Whether the scores are strictly increasing."""
    return all(low < high for low, high in pairwise(scores))


def bar(score: float, width: int = 20) -> str:
    """A score in [-1, 1] as a bar from the middle of a line."""
    length = round(abs(score) * width)
    left = "#" * length if score < 0 else ""
    right = "#" * length if score > 0 else ""
    return f"{left:>{width}}|{right:<{width}}"
