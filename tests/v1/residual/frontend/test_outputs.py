# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.readouts.results import ReadoutResult


def result(*positions: int) -> ReadoutResult:
    values = np.asarray(positions, dtype=np.float32)[:, None]
    return ReadoutResult(
        "probe", list(positions), ((0, "post_block"),), {"values": values}
    )


def sample(index: int, *positions: int, finished: bool = False) -> CompletionOutput:
    reason = "stop" if finished else None
    found = CompletionOutput(index, "", [1], None, None, finish_reason=reason)
    found.readouts = {"p": result(*positions)}
    return found


def output(*samples: CompletionOutput, **named: str) -> RequestOutput:
    made = RequestOutput("r", "", [1], None, list(samples), False)
    for name, value in named.items():
        setattr(made, name, value)
    return made


def test_an_output_without_results_says_so() -> None:
    one = output()
    assert one.readouts == {} and one.steering is None and one.capture_results is None
    assert one.capture_id is None and one.hook_results is None
    assert one.activations is None


def test_merged_outputs_of_a_sample_have_the_results_of_both() -> None:
    first = output(sample(0, 3), sample(1, 3))
    first.add(output(sample(1, 4), capture_id="c"), aggregate=True)
    assert [one.readouts["p"].positions for one in first.outputs] == [[3], [3, 4]]
    assert first.capture_id == "c"


@pytest.mark.parametrize("aggregate", [True, False])
def test_the_last_output_of_a_sample_has_all_results(aggregate: bool) -> None:
    first = output(sample(0, 3))
    first.add(output(sample(0, 3, 4, finished=True)), aggregate)
    assert first.readouts["p"].positions == [3, 4]


def test_receipts_survive_merging() -> None:
    first = output(sample(0, 3))
    first.outputs[0].steering = {"doses": 1}
    first.add(output(sample(0, 4)), aggregate=True)
    assert first.steering == {"doses": 1}


def test_a_text_and_its_readouts_are_one_file(tmp_path: Path) -> None:
    one = output(sample(0, 1))
    lens = {"token_ids": np.array([[[7]]], np.int32), "logprobs": np.zeros((1, 1, 1))}
    one.outputs[0].readouts |= {
        "lens": ReadoutResult("lens", [0], ((0, "post_block"),), lens)
    }
    words: Any = SimpleNamespace(decode=lambda ids: f"<{ids[0]}>")
    one.prompt_token_ids = [4]
    one.save_html(tmp_path / "one.html", words)
    page = (tmp_path / "one.html").read_text()
    found = re.search(r'id="results">(.*?)</script>', page)
    assert found is not None
    tinted, table = json.loads(found[1])
    assert tinted["tokens"] == [{"text": "<4>"}, {"text": "<1>"}]
    assert tinted["values"] == [None, 1.0] and table["texts"] == {"7": "<7>"}
    one.prompt_token_ids = None
    with pytest.raises(ValueError, match="embeddings"):
        one.save_html(tmp_path / "one.html", words)


def test_several_samples_are_not_reduced_to_the_first() -> None:
    one = output(sample(0, 3), sample(1, 4))
    with pytest.raises(ValueError, match=r"output\.outputs\[i\]\.readouts"):
        _ = one.readouts
    assert one.steering is None, "no sample has a receipt"
    one.outputs[1].steering = {"doses": 1}
    with pytest.raises(ValueError, match=r"output\.outputs\[i\]\.steering"):
        _ = one.steering


def test_a_readout_is_shown_by_its_shapes() -> None:
    found = ReadoutResult("norm", [3, 4], ((1, "post_block"),), error="lost")
    found.arrays["norm"] = np.zeros((2, 1), np.float32)
    shown = "ReadoutResult(norm, 2 positions, 1 taps, norm [2, 1], error='lost')"
    assert repr(found) == shown
