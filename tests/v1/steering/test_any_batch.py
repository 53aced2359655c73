# SPDX-License-Identifier: Apache-2.0
"""In any batch, each request gets the tokens, rows, readouts and receipt it has alone.

Programs of all operations, positions and conditions, with captures, readouts and ends
by readouts, while prompts are chunked, found in the cache, preempted and aborted.
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from tests.support import asynchronous
from tests.v1.readouts._reading import write_modules
from tests.v1.steering import _engine, _models
from tests.v1.steering._models import vector
from vllm import SamplingParams
from vllm.v1.steering.plan import PackedVectors

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = int(os.environ.get("ANY_BATCH_EXAMPLES", "4"))
MOST_STEPS = 3000
HOOKS = ("pre_attn", "post_attn", "post_block")
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
LENGTHS, MAX_TOKENS = [1, 7, 31, 33, 64, 70], [1, 2, 8, 50]
OWN = {"key", "request_id", "steps"}
"""Fields of answers that name the request, or depend on the batch."""


vectors = st.integers(0, 30).map(vector)
pairs = st.tuples(vectors, vectors).map(list).map(torch.stack)
scales = st.sampled_from([-1.5, -0.5, 0.25, 1.0, 2.0])


def positions(length: int) -> st.SearchStrategy[Any]:
    names = ["all", "last_prompt", "all_prompt", "all_generated"]
    last = st.integers(1, min(length, 4)).map(lambda count: {"last": count})
    listed = st.sets(st.integers(0, length - 1), min_size=1, max_size=5)
    limits = st.tuples(st.integers(0, length - 1), st.integers(0, length - 1))
    ranges = limits.map(lambda ends: {"ranges": [[min(ends), max(ends) + 1]]})
    return st.sampled_from(names) | last | listed.map(sorted) | ranges


def operations(layer: int, hook: str) -> st.SearchStrategy[dict[str, Any]]:
    own = st.fixed_dictionaries
    kinds: list[st.SearchStrategy[dict[str, Any]]] = [
        own({"vector": vectors, "scale": scales}),
        own({"vector": vectors, "scale": st.just(0.3), "norm_match": st.just(True)}),
        own({"vector": vectors, "op": st.just("project_out")}),
        own({"vector": vectors, "op": st.just("clamp"), "max": scales}),
        own({"vector": vectors, "op": st.just("swap"), "target": vectors}),
        own({"vector": vectors, "op": st.just("replace"), "alpha": st.just(0.5)}),
        own({"plane": pairs, "op": st.just("rotate"), "degrees": st.integers(0, 180)}),
        own({"read": pairs, "write": pairs, "op": st.just("low_rank")}),
    ]
    if (layer, hook) == (1, "post_block"):
        sae = {"op": "feature", "sae": "jump", "value": 3.0}
        kinds.append(st.integers(0, 199).map(lambda one: {**sae, "feature": one}))
    return st.one_of(kinds)


def conditions(layer: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "probe": vectors,
            "layer": st.integers(0, max(layer - 1, 0)),
            "hook": st.just("pre_attn"),
            "above": scales,
            "scope": st.sampled_from(["token", "token", "rest", "prompt"]),
        }
    )


@st.composite
def entries(draw: st.DrawFn, length: int, layer: int, hook: str) -> dict[str, Any]:
    entry = dict(draw(operations(layer, hook)))
    if draw(st.integers(0, 2)) == 0:
        entry["positions"] = draw(positions(length))
    if draw(st.integers(0, 2)) == 0:
        entry["when"] = draw(conditions(layer))
    return entry


@st.composite
def programs(draw: st.DrawFn, length: int) -> dict[str, Any]:
    program: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 3))):
        layer = draw(st.integers(0, _models.LAYERS - 1))
        hook = draw(st.sampled_from(HOOKS))
        entry = draw(entries(length, layer, hook))
        program.setdefault(hook, {}).setdefault(layer, []).append(entry)
    return program


CAPTURES = st.fixed_dictionaries(
    {
        "hooks": st.fixed_dictionaries(
            {"post_block": st.sampled_from(["all", [0, 2]])},
            optional={"pre_attn": st.just([1]), "post_attn": st.just("all")},
        ),
        "positions": st.sampled_from(["all", "all_prompt", "all_generated"]),
    }
)
PROBE = {"kind": "probe", "probe": "direction"}
MEAN = {"kind": "rows", "hooks": {"post_attn": [1]}, "reduce": "mean"}
READOUTS = st.fixed_dictionaries(
    {"probe": st.just(PROBE)},
    optional={
        "lens": st.just({"kind": "lens", "layers": "all", "top_k": 3}),
        "sae": st.just({"kind": "sae", "sae": "topk", "top_k": 4}),
        "norm": st.just({"kind": "norm", "hooks": {"post_block": "all"}}),
        "mean": st.just(MEAN),
    },
)
STOPS = st.floats(0, 3).map(
    lambda above: [{"readout": "probe", "index": 0, "above": above}]
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    length, text = draw(st.sampled_from(LENGTHS)), draw(st.integers(0, 2))
    fields: dict[str, Any] = {}
    for tier in TIERS:
        if draw(st.integers(0, 2)) == 0:
            fields[tier] = draw(programs(length))
    if draw(st.booleans()):
        fields["capture"] = {"inline": draw(CAPTURES)}
    if draw(st.booleans()):
        fields["readouts"] = draw(READOUTS)
        if draw(st.booleans()):
            fields["stop_when"] = draw(STOPS)
    fields["steering_receipt"] = draw(st.booleans())
    return {
        # Few texts, so that requests find each other's blocks in the cache.
        "prompt": [(7 * i * (text + 1) + 3) % _models.VOCAB for i in range(length)],
        "max_tokens": draw(st.sampled_from(MAX_TOKENS)),
        "fields": fields,
        "abort_after": draw(st.sampled_from([None, None, None, None, 3])),
    }


class Bench:
    """An engine with few cache blocks, and short steps for all its requests."""

    def __init__(self, folder: Path, ahead: bool) -> None:
        path = _models.save("llama", folder / "model")
        with asynchronous.allowed():
            self.llm = _engine.engine(
                path,
                async_scheduling=ahead,
                enable_prefix_caching=True,
                block_size=32,
                max_model_len=128,
                max_num_batched_tokens=24,
                num_gpu_blocks_override=10,
                capture_consumers=["inline"],
                **write_modules(folder).options,
            )
        self.engine = self.llm.llm_engine
        self._serial = 0

    def run(self, batch: Sequence[Mapping[str, Any]], aborts: bool) -> list[Any]:
        """The last output of each request, None for an aborted one.

        Raises:
            ValueError: a request is refused; then the batch has no other one.

        """
        self._serial += 1
        names = [f"{self._serial}-{number}" for number in range(len(batch))]
        for name, one in zip(names, batch, strict=True):
            sampling = SamplingParams(
                max_tokens=one["max_tokens"],
                temperature=0,
                logprobs=2,
                detokenize=False,
                ignore_eos=True,
                **one["fields"],
            )
            self.engine.add_request(name, {"prompt_token_ids": one["prompt"]}, sampling)
        finished: dict[str, Any] = {}
        steps = 0
        while self.engine.has_unfinished_requests():
            for name, one in zip(names, batch, strict=True):
                if aborts and one["abort_after"] == steps and name not in finished:
                    self.engine.abort_request([name])
                    finished[name] = None
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
            steps += 1
            assert steps < MOST_STEPS, "the requests do not come to their end"
        self.engine.capture.wait([one for one in finished.values() if one is not None])
        return [finished.get(name) for name in names]

    def run_alone(self, one: Mapping[str, Any]) -> Any:
        assert self.llm.reset_prefix_cache()
        return self.run([one], aborts=False)[0]


@pytest.fixture(scope="module", params=["sync", "async"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    opened = Bench(tmp_path_factory.mktemp("any"), request.param == "async")
    yield opened
    opened.engine.engine_core.shutdown()


# An engine that failed has requests in flight: no example can be reduced with it.
@settings(
    max_examples=EXAMPLES,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(requests(), min_size=8, max_size=12))
def test_answers_do_not_depend_on_what_shares_the_batch(
    bench: Bench, drawn: list[dict[str, Any]]
) -> None:
    batch, alone = [], []
    for one in drawn:
        try:
            alone.append(bench.run_alone(one))
        except ValueError:
            event("refused")  # For example, the condition reads where nothing is yet.
        else:
            batch.append(one)
    assert bench.llm.reset_prefix_cache()
    for state in ("cold", "warm"):
        outputs = bench.run(batch, aborts=True)
        for one, output, expected in zip(batch, outputs, alone, strict=True):
            if output is not None:
                check(one, output, expected, state)


def test_nothing_is_left_of_requests(bench: Bench) -> None:
    """Of more configurations than there are slots, and some aborted requests."""
    before = packed_vectors()
    batch = [
        {
            "prompt": [(n % 5 * 11 + i * 3) % _models.VOCAB for i in range(40 + n % 7)],
            "max_tokens": 8 + n,
            "fields": {TIERS[n % 3]: {HOOKS[n % 2]: {n % 3: vector(n)}}},
            "abort_after": 4 if n % 5 == 0 else None,
        }
        for n in range(30)
    ]
    outputs = bench.run(batch, aborts=True)
    assert outputs.count(None) > 3
    core: Any = bench.engine.engine_core.engine_core
    assert core.scheduler.residual.steering.slots.in_use == 0
    assert bench.llm.get_steering()["rows_in_use"] == 0
    bench.engine.step()  # Sends the last ends to the worker.
    runner = core.model_executor.driver_worker.worker.model_runner
    slots = bench.llm.llm_engine.vllm_config.steering_config.max_configs
    assert len(runner.residual.steering._slots) <= slots
    assert len(runner.residual.steering._prompt_lengths) <= 8
    assert packed_vectors() - before <= 3 * slots, "vectors of ended requests"


def packed_vectors() -> int:
    """How many there are, those of earlier tests included."""
    gc.collect()
    return sum(isinstance(one, PackedVectors) for one in gc.get_objects())


def check(one: Mapping[str, Any], output: Any, expected: Any, state: str) -> None:
    text, own = output.outputs[0], expected.outputs[0]
    if text.token_ids != own.token_ids:
        assert is_near_tie(text, own), (state, one, text.token_ids, own.token_ids)
        return
    ends = [(t.finish_reason, t.stop_reason) for t in (text, own)]
    assert ends[0] == ends[1], (state, one)
    for name in ("capture_results", "readouts", "steering"):
        found = dict(leaves(getattr(output, name)))
        wanted = dict(leaves(getattr(expected, name)))
        assert found.keys() == wanted.keys(), (state, name, one)
        for path, value in wanted.items():
            assert is_same(found[path], value), (state, name, path, one)


def is_near_tie(text: Any, own: Any) -> bool:
    """Whether the first different token was nearly as likely as the other one."""
    same = zip(text.token_ids, own.token_ids, strict=False)
    first = next((i for i, (one, other) in enumerate(same) if one != other), None)
    if first is None:
        return False
    best = sorted(one.logprob for one in own.logprobs[first].values())
    return best[-1] - best[-2] < 1e-3


def leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The values within mappings, sequences and records, with their paths."""
    if hasattr(value, "__dataclass_fields__"):
        value = {name: getattr(value, name) for name in value.__dataclass_fields__}
    elif hasattr(value, "__struct_fields__"):
        value = {name: getattr(value, name) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        items = [(key, one) for key, one in value.items() if key not in OWN]
    elif isinstance(value, list | tuple):
        items = list(enumerate(value))
    else:
        yield (), value
        return
    for key, one in items:
        for path, leaf in leaves(one):
            yield (key, *path), leaf


def is_same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor | np.ndarray | float):
        return bool(found == wanted)
    one, other = (np.asarray(value, np.float64) for value in (found, wanted))
    return one.shape == other.shape and np.allclose(
        one, other, rtol=1e-3, atol=1e-3, equal_nan=True
    )
