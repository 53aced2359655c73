# SPDX-License-Identifier: Apache-2.0
"""The text ends at the token that fired, however late the engine learns of it."""

from typing import Any

import numpy as np
import pytest

from tests.support.captured import CapturedEngine, prompt
from tests.v1.readouts._reading import read_out

pytestmark = pytest.mark.e2e

PROBE = {"kind": "probe", "probe": "direction"}
PROMPTS = [prompt(30, 11), prompt(5, 12), prompt(9, 13), prompt(40, 14)]


def plain(engine: CapturedEngine, **options: Any) -> list[Any]:
    return read_out(engine, PROMPTS, {"p": PROBE}, max_tokens=16, **options)


@pytest.mark.parametrize("rank", [0, 2, 7])
def test_generation_ends_with_the_first_token_that_fires(
    engine: CapturedEngine, rank: int
) -> None:
    for number, output in enumerate(plain(engine)):
        values = output.readouts["p"]["values"][:, 1]
        threshold = float(np.sort(values)[rank]) - 1e-4
        first = int(np.argmax(values > threshold))
        stop = [{"readout": "p", "index": 1, "above": threshold}]
        (found,) = read_out(
            engine, [PROMPTS[number]], {"p": PROBE}, max_tokens=16, stop_when=stop
        )
        text = found.outputs[0]
        assert list(text.token_ids) == list(output.outputs[0].token_ids)[: first + 1]
        assert (text.finish_reason, text.stop_reason) == ("stop", "readout:p")
        assert len(found.readouts["p"].positions) == first + 1
        assert found.readouts["p"]["values"][-1, 1] > threshold
        assert found.readouts["p"].error is None


def test_what_never_fires_ends_nothing(engine: CapturedEngine) -> None:
    stop = [{"readout": "p", "above": 1e6}, {"readout": "p", "below": -1e6}]
    expected = plain(engine)
    found = read_out(engine, PROMPTS, {"p": PROBE}, max_tokens=16, stop_when=stop)
    for a, b in zip(expected, found):
        assert list(a.outputs[0].token_ids) == list(b.outputs[0].token_ids)
        assert b.outputs[0].finish_reason == "length"


def test_prompt_tokens_end_nothing(engine: CapturedEngine) -> None:
    always = [{"readout": "p", "above": -1e6}]
    probe = PROBE | {"positions": "all"}
    for output in read_out(engine, PROMPTS, {"p": probe}, stop_when=always):
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].stop_reason == "readout:p"


def test_a_stop_token_before_it_comes_first(engine: CapturedEngine) -> None:
    output = plain(engine)[0]
    tokens = list(output.outputs[0].token_ids)
    values = output.readouts["p"]["values"][:, 0]
    late = int(np.argmax(values[4:])) + 4
    stop = [{"readout": "p", "above": float(values[late]) - 1e-4}]
    fired = int(np.argmax(values > stop[0]["above"]))
    (found,) = read_out(
        engine,
        PROMPTS[:1],
        {"p": PROBE},
        max_tokens=16,
        stop_when=stop,
        stop_token_ids=[tokens[1]],
    )
    ended = min(fired, tokens.index(tokens[1]))
    assert list(found.outputs[0].token_ids) == tokens[: ended + 1]


def test_features_and_lenses_can_end_a_request(engine: CapturedEngine) -> None:
    spec = {
        "sae": {"kind": "sae", "sae": "jump", "features": [3, 4, 5, 6, 7, 8]},
        "lens": {"kind": "lens", "layers": [1], "tokens": [700]},
    }
    (output,) = read_out(engine, PROMPTS[:1], spec, max_tokens=16)
    tokens = list(output.outputs[0].token_ids)
    for name, values, index in (
        ("sae", output.readouts["sae"]["activations"][:, 2], 5),
        ("lens", output.readouts["lens"]["token_logprobs"][:, 0, 0], 0),
    ):
        above = float(np.sort(values)[-2])
        stop = [{"readout": name, "index": index, "above": above}]
        (found,) = read_out(engine, PROMPTS[:1], spec, max_tokens=16, stop_when=stop)
        first = np.flatnonzero(values > above)
        ended = int(first[0]) if len(first) else 15
        assert list(found.outputs[0].token_ids) == tokens[: ended + 1]
