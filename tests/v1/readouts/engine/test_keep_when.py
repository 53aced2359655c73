# SPDX-License-Identifier: Apache-2.0
"""`keep_when`: consumers get rows only if, or where, a readout fires."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.captured import CapturedEngine, prompt
from tests.v1.readouts._reading import read_out
from vllm import RequestOutput
from vllm.v1.capture.results import RowsByTap

pytestmark = pytest.mark.e2e

PROMPTS = [prompt(50, 1), prompt(7, 2), prompt(13, 3)]
"""Prompts, of which the first takes several steps."""

NORM = {"kind": "norm", "hooks": {"post_block": [1]}, "positions": "all"}
ROWS = {"hooks": {"post_block": [0, 2], "pre_attn": [1]}, "positions": "all"}
NUM_TAPS = 3


def run(
    engine: CapturedEngine, capture: dict[str, Any], **options: Any
) -> list[RequestOutput]:
    chosen = {"capture": capture, "capture_wait": True} | options
    return read_out(engine, PROMPTS, {"size": NORM}, **chosen)


def sizes(output: RequestOutput) -> np.ndarray:
    return output.readouts["size"]["norm"][:, 0]


def around(fired: Sequence[int], before: int, after: int, stop: int) -> list[int]:
    near = {p + d for p in fired for d in range(-before, after + 1)}
    return sorted(p for p in near if 0 <= p < stop)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (1, 3)])
def test_rows_are_kept_around_tokens_that_fire(
    engine: CapturedEngine, before: int, after: int
) -> None:
    plain = run(engine, {"inline": ROWS})
    at = float(np.quantile(np.concatenate([sizes(one) for one in plain]), 0.9))
    window = {"before": before, "after": after}
    keep = {"readout": "size", "above": at, "scope": "token", **window}
    outputs = run(engine, {name: ROWS | {"keep_when": keep} for name in CONSUMERS})
    for whole, output in zip(plain, outputs):
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids
        values = sizes(output)
        fired = np.flatnonzero(values > at).tolist()
        wanted = around(fired, before, after, len(values))
        result = output.capture_results["inline"]
        assert result.status == "ok" and result.kept == len(wanted) * NUM_TAPS
        every, kept = whole.capture_results["inline"].payload, result.payload
        assert bool(kept) == bool(wanted)
        for tap, rows in (kept or RowsByTap()).items():
            assert kept.positions[tap] == wanted
            assert len(kept.token_ids[tap]) == len(wanted)
            torch.testing.assert_close(rows, every[tap][wanted], rtol=1e-4, atol=1e-4)
        if wanted:
            engine.check(output, wanted)


@pytest.mark.parametrize("scope", ["request", "token"])
def test_the_last_row_alone_is_kept_or_none(engine: CapturedEngine, scope: str) -> None:
    """Though rows of earlier tokens lie around the one that fires."""
    near = {"before": 0, "after": 52} if scope == "token" else {}
    keep = {"readout": "size", "above": 0, "scope": scope, **near}
    spec = ROWS | {"positions": "last_generated", "keep_when": keep}
    readouts = {"size": NORM | {"positions": [0]}}
    for output in read_out(engine, PROMPTS, readouts, capture={"inline": spec}):
        result = output.capture_results["inline"]
        last = 6 + len(output.prompt_token_ids or ())
        assert result.status == "ok" and result.error is None
        is_kept = scope == "request" or last <= 52
        assert result.kept == NUM_TAPS * is_kept
        found = result.payload.positions.values() if result.payload else []
        assert [one for one in found if one] == [[last]] * (NUM_TAPS * is_kept)


CONSUMERS = ("inline", "keeper")


def test_requests_that_do_not_fire_write_nothing(
    engine: CapturedEngine, files: Path
) -> None:
    plain = run(engine, {"inline": ROWS})
    most = sorted(float(sizes(one).max()) for one in plain)
    at = (most[1] + most[2]) / 2
    spec = ROWS | {"keep_when": {"readout": "size", "above": at}}
    tagged = dict.fromkeys(("filesystem", "arrow", "single"), spec | {"tag": "kept"})
    others = dict.fromkeys(("inline", "keeper", "memory"), spec)
    outputs = run(engine, {**tagged, **others})
    written = {path.parent.name for path in files.glob("*/files/kept/*/*")}
    for whole, output in zip(plain, outputs):
        fires = bool(sizes(whole).max() > at)
        rows = len(sizes(output)) * NUM_TAPS
        assert len(output.capture_results) == 6
        for name, result in output.capture_results.items():
            assert result.status == "ok" and result.kept == (rows if fires else 0)
            if name != "keeper":  # Which says what it got, also if that is nothing.
                assert bool(result.payload) == fires, name
        assert (output.request_id in written) == fires
        if fires:
            assert len(engine.llm.captured(output.request_id)) == 1
            engine.llm.drop_captured(output.request_id)
        else:
            with pytest.raises(ValueError, match="keep_when .* did not fire"):
                engine.llm.captured(output.request_id)
    assert sum(bool(one.capture_results["filesystem"].kept) for one in outputs) == 1


def test_each_of_several_samples_keeps_its_own(
    engine: CapturedEngine,
) -> None:
    keep = {"readout": "size", "below": 1e9, "scope": "token"}
    capture = {"inline": ROWS | {"keep_when": keep}}
    for output in run(engine, capture, n=2, temperature=1.0):
        result = output.capture_results["inline"]
        stops = [len(one.token_ids) for one in output.outputs]
        length = len(output.prompt_token_ids or ())
        rows = [length + stop - 1 for stop in stops]
        assert result.kept == sum(rows) * NUM_TAPS
        assert [len(next(iter(result.payload[i].values()))) for i in (0, 1)] == rows


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ({"above": 1}, 'needs a "readout", a name; the request has'),
        ({"readout": "other", "above": 1}, "no readout 'other'"),
        ({"readout": "size"}, "above, below or both"),
        ({"readout": "size", "above": 1, "index": 1}, "1 value"),
        ({"readout": "size", "above": 1, "scope": "all"}, "scope must be one of"),
        ({"readout": "size", "above": 1, "before": 1}, "Leave them out"),
        ({"readout": "size", "above": 1, "scope": "token", "after": -1}, "after must"),
        ({"readout": "size", "above": 1, "until": 1}, "the keys of an entry"),
        (5, "the keys of an entry"),
    ],
)
def test_what_cannot_be_decided_is_refused(
    engine: CapturedEngine, keep: Any, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        run(engine, {"inline": ROWS | {"keep_when": keep}})


def test_it_needs_a_readout(engine: CapturedEngine) -> None:
    capture = {"inline": ROWS | {"keep_when": {"readout": "size", "above": 1}}}
    with pytest.raises(ValueError, match="this request has none"):
        read_out(engine, PROMPTS, None, capture=capture)  # type: ignore[arg-type]
