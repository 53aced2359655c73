# SPDX-License-Identifier: Apache-2.0
"""interp-engine's routes: the most that is taken keeps nobody waiting."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hostile.client import Client, watching
from tests.hostile.conftest import WIDTH
from tests.hostile.test_unread import PROMPT, peak
from tests.support.server import Server
from vllm.entrypoints.serve.interp_engine.room import MOST_DIRECTIONS

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.hostile]

ADDITION = {"method": "additive", "vector": [0.25] * WIDTH, "scale": 0.1}


def packed(rows: int) -> dict[str, Any]:
    """Rows of the stream's width, as base64."""
    data = np.full((rows, WIDTH), 0.25, np.float32).tobytes()
    text = base64.b64encode(data).decode()
    return {"dtype": "float32", "shape": [rows, WIDTH], "data": text}


def written(body: dict[str, Any]) -> dict[str, Any]:
    """A body in which numbers of rows are replaced by so many rows."""
    if isinstance(rows := body.get("residuals"), int):
        return body | {"residuals": packed(rows)}
    if isinstance(rows := body.get("directions"), int):
        sets = [{"point": "resid_post.1", "vectors": packed(rows // 2)}] * 2
        return {"prompt_token_ids": PROMPT[:2], "directions": sets}
    return body


MOST_ROWS = MOST_DIRECTIONS // WIDTH
BODIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "directions": ("project", {"directions": MOST_ROWS}, 200),
    "more directions": ("project", {"directions": 2 * MOST_ROWS}, 422),
    "lens": (
        "lens",
        {"prompt_token_ids": PROMPT, "lenses": [{"layers": [0, 1, 2]}], "top_n": 64},
        200,
    ),
    "lens as a whole": (
        "lens",
        {
            "prompt_token_ids": PROMPT,
            "lenses": [{"layers": [0, 1, 2]}],
            "top_n": 64,
            "stream": False,
        },
        200,
    ),
    "residuals": (
        "decode_residuals",
        {"residuals": 13_000, "top_k": 10},
        200,
    ),
    "residuals of a megabyte": (
        "decode_residuals",
        {"residuals": 2_900, "top_k": 45},
        200,
    ),
    "operations": (
        "capture",
        {
            "prompt_token_ids": PROMPT[:2],
            "points": ["resid_post.2"],
            "steering": [{"point": "resid_post", "layers": {"1": [ADDITION] * 4096}}],
        },
        200,
    ),
}
"""Routes, bodies with numbers in place of many rows, and statuses."""


@pytest.mark.parametrize("name", BODIES)
def test_the_most_that_is_taken_delays_nobody(
    attacked: Server, client: Client, name: str
) -> None:
    route, body, status = BODIES[name]
    body = written(body)
    Path(f"/proc/{attacked.pid}/clear_refs").write_text("5")  # The peak starts anew.
    before = peak(attacked.pid)
    with watching(attacked) as watch:
        reply = client.post(f"/v1/interp-engine/{route}", body)
    assert reply.status == status, str(reply.body)[:500]
    more = peak(attacked.pid) - before
    print(
        f"{name}: /health {max(watch.waits):.3f} s, of it running "
        f"{max(watch.owned):.3f} s; {more >> 20} MiB more"
    )
    assert max(watch.owned) < 0.25
    # Longer bodies take a few times their own size.
    longer = max(len(json.dumps(body)) - (1 << 20), 0)
    assert more < (64 << 20) + 8 * longer
