# SPDX-License-Identifier: Apache-2.0
"""The text ends at the token that fired, however late the engine learns of it.

Thresholds lie in the middle of the widest gap between the scores of a run without a
condition, and what is checked is the run with the condition itself: its own scores say
where its text had to end.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.captured import CapturedEngine, prompt
from tests.v1.readouts._reading import read_out

pytestmark = pytest.mark.e2e

PROBE = {"kind": "probe", "probe": "direction"}
PROMPTS = [prompt(30, 11), prompt(5, 12), prompt(9, 13), prompt(40, 14)]
MOST = 16


def plain(engine: CapturedEngine, **options: Any) -> list[Any]:
    return read_out(engine, PROMPTS, {"p": PROBE}, max_tokens=MOST, **options)


def late_threshold(values: npt.NDArray[np.float32]) -> float:
    """The middle of the widest gap between scores that the first ones are below."""
    ranked = np.sort(values)
    gaps = [
        (high - low, float(low + high) / 2)
        for low, high in pairwise(ranked)
        if (values[:2] <= low).all()
    ]
    assert gaps, "the scores are highest at the first tokens: use another prompt"
    return max(gaps)[1]


def check_ended(output: Any, values: npt.NDArray[np.float32], above: float) -> None:
    """The last token of the text is the first whose own score fires."""
    text = output.outputs[0]
    assert (text.finish_reason, text.stop_reason) == ("stop", "readout:p")
    assert len(text.token_ids) == len(values)
    assert values[-1] > above and (values[:-1] <= above).all()
    assert output.readouts["p"].error is None


def test_a_result_that_comes_late_ends_the_text_where_it_fired(
    engine: CapturedEngine,
) -> None:
    """With steps computed ahead, more tokens were sampled when the score was known."""
    output = plain(engine)[0]
    index = int(np.argmax(output.readouts["p"]["values"].argmax(axis=0)))
    above = late_threshold(output.readouts["p"]["values"][:, index])
    stop = [{"readout": "p", "index": index, "above": above}]
    before = engine.llm.get_readouts()["counters"]["probe"]["rows"]
    (found,) = read_out(
        engine, PROMPTS[:1], {"p": PROBE}, max_tokens=MOST, stop_when=stop
    )
    computed = engine.llm.get_readouts()["counters"]["probe"]["rows"] - before
    own = found.readouts["p"]["values"][:, index]
    check_ended(found, own, above)
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    assert (computed > len(own)) == config.async_scheduling


def test_prompt_tokens_end_nothing(engine: CapturedEngine) -> None:
    always = [{"readout": "p", "above": -1e6}]
    probe = PROBE | {"positions": "all"}
    for output in read_out(engine, PROMPTS, {"p": probe}, stop_when=always):
        assert len(output.outputs[0].token_ids) == 1
        assert output.outputs[0].stop_reason == "readout:p"


def test_a_stop_token_before_it_comes_first(engine: CapturedEngine) -> None:
    always = [{"readout": "p", "above": -1e6}]
    every = list(range(engine.llm.llm_engine.model_config.get_vocab_size()))
    options = {"max_tokens": MOST, "stop_when": always, "stop_token_ids": every}
    for output in read_out(engine, PROMPTS, {"p": PROBE}, **options):
        (token,) = output.outputs[0].token_ids
        assert output.outputs[0].stop_reason == token


def test_features_and_lenses_can_end_a_request(engine: CapturedEngine) -> None:
    spec = {
        "sae": {"kind": "sae", "sae": "jump", "features": [3, 4, 5, 6, 7, 8]},
        "lens": {"kind": "lens", "layers": [1], "tokens": [700]},
    }

    def scores(output: Any, name: str) -> npt.NDArray[np.float32]:
        if name == "sae":
            return output.readouts["sae"]["activations"][:, 2]
        return output.readouts["lens"]["token_logprobs"][:, 0, 0]

    (output,) = read_out(engine, PROMPTS[:1], spec, max_tokens=MOST)
    for name, index in (("sae", 5), ("lens", 0)):
        ranked = np.sort(scores(output, name))
        widest = int(np.argmax(np.diff(ranked)))
        above = float(ranked[widest] + ranked[widest + 1]) / 2
        assert ranked[widest] < above < ranked[widest + 1], "the scores are all alike"
        stop = [{"readout": name, "index": index, "above": above}]
        (found,) = read_out(engine, PROMPTS[:1], spec, max_tokens=MOST, stop_when=stop)
        own = scores(found, name)
        assert found.outputs[0].stop_reason == f"readout:{name}"
        assert len(found.outputs[0].token_ids) == len(own)
        assert own[-1] > above and (own[:-1] <= above).all()


def test_a_number_that_cannot_travel_is_refused(engine: CapturedEngine) -> None:
    large = PROBE | {"probe": {"vectors": [[0.0] * 64], "bias": [10**40]}, "layer": 0}
    rule = {"readout": "p", "above": 10**40}
    for readout, options in ((large, {}), (PROBE, {"stop_when": [rule]})):
        with pytest.raises(ValueError, match="64 bits"):
            read_out(engine, PROMPTS[:1], {"p": readout}, **options)
