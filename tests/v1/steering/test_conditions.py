# SPDX-License-Identifier: Apache-2.0
"""Entries with a condition act where the probe fires, like hooks in transformers."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.inner_reference import InnerReference
from tests.v1.steering import _engine, _models
from tests.v1.steering._engine import compared, generate, logprobs, params, tokens
from tests.v1.steering._models import vector
from vllm.v1.readouts.modules import save_probe

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLOCK = 32
PROMPT = [(5 * i + 3) % _models.VOCAB for i in range(BLOCK + 9)]
SIZE = len(PROMPT)
GENERATED = 8


PROBE, V, W = vector(1), vector(2), vector(3)
P, U = PROBE.double(), (V / V.norm()).double()
NAMED = torch.stack([vector(8), 0.1 * PROBE])


@pytest.fixture(scope="module", params=_models.matrix())
def steered(
    request: Any, tmp_path_factory: Any
) -> Iterator[tuple[Any, InnerReference]]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    path = _models.save(request.param, folder / "model")
    file = str(folder / "probe.safetensors")
    bias = torch.tensor([0.0, 0.25])
    save_probe(file, NAMED, bias, layer=0, hook="post_block", activation="sigmoid")
    llm = _engine.engine(
        path,
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        max_steering_configs=8,
        readout_modules={"mood": file},
    )
    yield llm, InnerReference(path)
    llm.llm_engine.engine_core.shutdown()


@pytest.fixture(autouse=True)
def cold(steered: Any) -> None:
    assert steered[0].reset_prefix_cache()


Values = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A condition, and its decisions in float64."""

    tap: tuple[int, str]
    """The tap at which the probe reads."""
    values: Values
    """Maps rows `[tokens, hidden]` to the compared value."""
    more: Mapping[str, Any] = field(default_factory=dict)
    below: bool = False
    sharpness: float | None = None

    def threshold(self, reference: InnerReference) -> float:
        """A threshold above which about half of the prompt's tokens lie clearly."""
        found = self.values(reference.rows_at(PROMPT, self.tap).double())
        middle = found.sort().values[SIZE // 4 : -SIZE // 4]
        widest = int(middle.diff().argmax())
        return float(middle[widest : widest + 2].mean())

    def when(self, threshold: float) -> dict[str, Any]:
        layer, hook = self.tap
        asked = {"probe": PROBE, "layer": layer, "hook": hook, **self.more}
        asked["below" if self.below else "above"] = threshold
        return asked if not self.sharpness else {**asked, "sharpness": self.sharpness}

    def gate(self, rows: torch.Tensor, threshold: float) -> torch.Tensor:
        """The gate `[tokens, 1]` of each row."""
        beyond = self.values(rows.double()) - threshold
        beyond = -beyond if self.below else beyond
        if self.sharpness:
            return torch.sigmoid(self.sharpness * beyond)[:, None]
        return (beyond > 0).double()[:, None]


CASES: dict[str, Case] = {
    "above": Case((0, "post_block"), lambda x: x @ P),
    "below, with a bias": Case(
        (0, "post_attn"), lambda x: x @ P + 0.75, {"bias": 0.75}, below=True
    ),
    "cosine": Case(
        (1, "pre_attn"),
        lambda x: x @ P / (x.norm(dim=-1) * P.norm()),
        {"cosine": True},
    ),
    "soft": Case((0, "pre_attn"), lambda x: x @ P, sharpness=0.7),
    "here": Case((1, "post_attn"), lambda x: x @ P),
    "named": Case(
        (0, "post_block"),
        lambda x: torch.sigmoid(0.1 * (x @ P) + 0.25),
        {"probe": "mood", "index": 1},
    ),
}
ACTS = (1, "post_attn")

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ENTRIES: dict[str, tuple[dict[str, Any], Change]] = {
    "add": ({"vector": V, "scale": 2}, lambda x, g: x + 2 * g * V.double()),
    "project_out": (
        {"vector": V, "op": "project_out"},
        lambda x, g: x - g * (x @ U)[:, None] * U,
    ),
    "replace": (
        {"vector": W, "op": "replace"},
        lambda x, g: (1 - g) * x + g * W.double(),
    ),
}


def changes(
    reference: InnerReference,
    case: Case,
    threshold: float,
    change: Change,
    from_row: int = 0,
) -> dict[Any, _models.Change]:
    """The hook in transformers: read at the probe's place, change at the entry's."""

    def act(stream: torch.Tensor) -> torch.Tensor:
        gate = case.gate(reference.rows[case.tap], threshold)
        changed = change(stream.double(), gate).to(stream.dtype)
        return torch.cat([stream[:from_row], changed[from_row:]])

    return {ACTS: act}


def at(*entries: dict[str, Any], tap: tuple[int, str] = ACTS) -> dict[str, Any]:
    return {tap[1]: {tap[0]: list(entries)}}


@pytest.mark.parametrize("tier", ["steering_vectors", "decode_steering_vectors"])
def test_an_entry_acts_where_its_probe_fires(steered: Any, tier: str) -> None:
    llm, reference = steered
    first = SIZE if tier.startswith("decode") else 0
    triples = [
        (case, case.threshold(reference), one)
        for case in CASES.values()
        for one in ENTRIES.values()
    ]
    sampling = [
        params(GENERATED, **{tier: at({**entry, "when": case.when(threshold)})})
        for case, threshold, (entry, _) in triples
    ]
    outputs = generate(llm, [PROMPT] * len(triples), sampling)
    effects = []
    for (case, threshold, (_, change)), output in zip(triples, outputs, strict=True):
        changed = changes(reference, case, threshold, change, first)
        wrong, effect = compared(output, reference, changed)
        assert wrong < 1e-4, (case, wrong)
        effects.append(effect)
    did = sum(effect > 1e-3 for effect in effects)
    assert did >= (len(effects) if first == 0 else len(effects) // 2), effects


def entry_of(case: str, reference: Any, **entry: Any) -> dict[str, Any]:
    one = CASES[case]
    return {"vector": V, **entry, "when": one.when(one.threshold(reference))}


SCOPED = {
    "prompt": ("steering_vectors", {"scope": "prompt"}, None),
    "prompt, mean": ("steering_vectors", {"scope": "prompt", "reduce": "mean"}, None),
    "prompt, soft": ("decode_steering_vectors", {"scope": "prompt"}, 0.7),
    "rest": ("decode_steering_vectors", {"scope": "rest"}, None),
}


@pytest.mark.parametrize("name", SCOPED)
def test_a_decision_holds_for_later_tokens(steered: Any, name: str) -> None:
    """In one batch with requests that come and go, each with its own decision."""
    llm, reference = steered
    tier, more, sharpness = SCOPED[name]
    case = replace(CASES["above"], more=more, sharpness=sharpness)
    _, change = ENTRIES["add"]
    prompts = [PROMPT[: SIZE - 3 * number] for number in range(6)]
    lengths = [4 + number for number in range(6)]
    # Without the entry: so the requests go on until it acts for the first time.
    plain = generate(llm, prompts, [params(length) for length in lengths])
    assert llm.reset_prefix_cache()
    deciding: list[torch.Tensor] = []
    for prompt, output in zip(prompts, plain, strict=True):
        ids, size = (prompt + tokens(output))[:-1], len(prompt)
        values = case.values(reference.rows_at(ids, case.tap).double())
        if name == "prompt, mean":
            deciding.append(values[:size].mean())
        else:
            deciding.append(values[size:].max() if name == "rest" else values[size - 1])
    # Some of the requests fire, some do not, and none of them narrowly.
    ordered = torch.stack(deciding).sort().values
    widest = int(ordered.diff().argmax())
    threshold = float(ordered[widest : widest + 2].mean())
    entry = {"vector": V, "scale": 2, "when": case.when(threshold)}
    asked = [params(length, **{tier: at(entry)}) for length in lengths]
    outputs = generate(llm, prompts, asked)
    open_, shut = 0, 0
    for prompt, output in zip(prompts, outputs, strict=True):
        size = len(prompt)
        gates: list[torch.Tensor] = []

        def decide(stream: torch.Tensor, size: int = size, gates: Any = gates) -> Any:
            here = case.gate(stream, threshold)
            if name == "prompt, mean":
                mean = case.values(stream.double())[:size].mean()
                here = (mean > threshold).double().expand(len(stream) - size, 1)
            elif name == "rest":
                here = here[size:].cummax(dim=0).values
            else:
                here = here[size - 1].expand(len(stream) - size, 1)
            gates.append(torch.cat([torch.zeros(size, 1), here]))
            return stream

        def act(stream: torch.Tensor, gates: Any = gates) -> torch.Tensor:
            return change(stream.double(), gates[-1]).to(stream.dtype)

        wrong, _ = compared(output, reference, {case.tap: decide, ACTS: act})
        assert wrong < 1e-4, (name, size, wrong)
        open_ += bool(gates[-1].any())
        shut += not gates[-1][size:].all()
    assert open_, "no gate was ever open"
    assert shut or sharpness, "no gate was ever shut"


def first_to_fire(
    case: Case, reference: Any, low: int, high: int
) -> tuple[list[int], float]:
    """A prompt and a threshold that a token at `[low, high)` is the first to exceed."""
    for seed in range(50):
        drawn = torch.Generator().manual_seed(seed)
        prompt = torch.randint(_models.VOCAB, (SIZE,), generator=drawn).tolist()
        found = case.values(reference.rows_at(prompt, case.tap).double())
        highest = found.cummax(dim=0).values
        grown = highest.diff()[low - 1 : high - 1]
        place = int(grown.argmax()) + low
        if float(grown.max()) > 1e-2 * float(highest[-1].abs()):
            return prompt, float(highest[place - 1 : place + 1].mean())
    raise AssertionError("no prompt has such a token")


@pytest.mark.parametrize("tier", ["steering_vectors", "prefill_steering_vectors"])
@pytest.mark.parametrize("chunk", [0, 1])
def test_a_prompt_token_decides_for_the_rest(
    steered: Any, tier: str, chunk: int
) -> None:
    """In either chunk of the prompt, beside others, with blocks in the prefix cache."""
    llm, reference = steered
    case = replace(CASES["above"], more={"scope": "rest"})
    bounds = (BLOCK + 1, SIZE - 1) if chunk else (2, BLOCK - 2)
    prompt, threshold = first_to_fire(case, reference, *bounds)
    entry = {"vector": V, "scale": 2, "when": case.when(threshold)}
    fields: dict[str, Any] = {tier: at(entry)}
    plain = generate(llm, [prompt], [params(GENERATED)])[0]
    asked = [params(), params(GENERATED, **fields), params()]
    both = [generate(llm, [PROMPT, prompt, prompt[:9]], asked)[1]]
    both += generate(
        llm, [prompt], [params(GENERATED, steering_receipt=True, **fields)]
    )
    gates: list[torch.Tensor] = []

    def decide(stream: torch.Tensor) -> torch.Tensor:
        gates.append(case.gate(stream, threshold).cummax(dim=0).values)
        if tier.startswith("prefill"):
            gates[-1][SIZE:] = 0
        return stream

    def act(stream: torch.Tensor) -> torch.Tensor:
        return ENTRIES["add"][1](stream.double(), gates[-1]).to(stream.dtype)

    for output in both:
        assert output.num_cached_tokens == 0, "a token that fires may be in the block"
        assert compared(output, reference, {case.tap: decide, ACTS: act})[0] < 1e-4
        assert not torch.equal(logprobs(output), logprobs(plain))
    open_ = gates[-1][:, 0].nonzero()[:, 0].tolist()
    assert bounds[0] <= open_[0] < bounds[1]
    (fired,) = both[1].steering["fired"].values()
    assert (fired["tokens"], fired["first"]) == (len(open_), open_[0])
    assert both[1].steering["applied"][0]["tokens"] == len(open_)


def test_a_shut_gate_and_a_neighbours_gate_change_no_bit(steered: Any) -> None:
    llm, reference = steered
    prompts = [PROMPT[i : i + 9] for i in range(4)]
    plain = generate(llm, prompts, [params(GENERATED)] * 4)
    assert llm.reset_prefix_cache()
    fires = entry_of("above", reference, op="replace")
    shut = {**fires, "when": {**fires["when"], "above": 1e6}}
    specs: list[dict[str, Any]] = [
        {},
        {"steering_vectors": at(fires)},
        {"steering_vectors": at(shut)},
        {},
    ]
    mixed = generate(llm, prompts, [params(GENERATED, **one) for one in specs])
    for number in range(4):
        same = torch.equal(logprobs(plain[number]), logprobs(mixed[number]))
        assert same == (number != 1)


def test_the_engine_and_a_request_have_conditions_of_their_own(steered: Any) -> None:
    llm, reference = steered
    mine, ours = CASES["above"], CASES["cosine"]
    limits = [one.threshold(reference) for one in (mine, ours)]
    llm.set_steering(at({"vector": V, "when": ours.when(limits[1])}))
    try:
        own = {"vector": W, "op": "project_out", "when": mine.when(limits[0])}
        sampling = [params(GENERATED, steering_vectors=at(own)), params(GENERATED)]
        both, only = generate(llm, [PROMPT] * 2, sampling)
    finally:
        llm.clear_steering()
    unit = (W / W.norm()).double()

    def add(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        return x + g * V.double()

    def project(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        x, own = add(x, g), mine.gate(reference.rows[mine.tap], limits[0])
        return x - own * (x @ unit)[:, None] * unit

    changed = changes(reference, ours, limits[1], add)
    assert compared(only, reference, changed)[0] < 1e-4
    changed = changes(reference, ours, limits[1], project)
    wrong, effect = compared(both, reference, changed)
    assert wrong < 1e-4 < effect


BAD: list[tuple[dict[str, Any], str]] = [
    ({"layer": 2}, "not known when the entry acts"),
    ({"layer": 1, "hook": "post_block"}, "not known when the entry acts"),
    ({"layer": 7}, "where the probe reads"),
    ({"hook": "mlp"}, "where the probe reads"),
    ({"probe": [1.0]}, "has 64 numbers"),
    ({"probe": [float("nan")] * _models.HIDDEN}, "finite"),
    ({"probe": [0.0] * _models.HIDDEN}, "zeros"),
    ({"probe": "unheard"}, "no probe is named"),
    ({"probe": "mood"}, "2 rows"),
    ({"probe": "mood", "index": 2}, "2 rows"),
    ({"probe": "mood", "index": 0, "bias": 1}, "has its own"),
    ({"probe": "mood", "index": 0, "above": 2}, "between 0 and 1"),
    ({"probe": "mood", "index": 0, "layer": 1, "hook": "pre_attn"}, "was made for"),
    ({"above": float("inf")}, "finite"),
    ({"above": True}, "finite"),
    ({"below": 1}, "not both"),
    ({"above": None}, "not both"),
    ({"sharpness": 0}, "above 0"),
    ({"cosine": 1}, "a boolean"),
    ({"bias": "x"}, "finite"),
    ({"scope": "ever"}, "not one of"),
    ({"treshold": 1}, "unknown key 'treshold'"),
    (
        {"scope": "rest", "layer": 1, "hook": "post_attn"},
        r"steering_vectors\.post_attn\.1\.when\.scope: .* an earlier hook point",
    ),
    ({"scope": "rest", "sharpness": 1}, "0 or 1"),
    ({"scope": "token", "reduce": "mean"}, 'needs "scope": "prompt"'),
    ({"scope": "token", "reduce": "last"}, 'needs "scope": "prompt"'),
    ({"scope": "prompt", "reduce": "median"}, "is not one of"),
]


def test_bad_conditions_are_refused_before_anything_is_scheduled(steered: Any) -> None:
    llm, _ = steered
    good = CASES["above"].when(0.5)
    for condition, said in [*BAD, (None, "it is"), (3, "it is")]:
        given = {**good, **condition} if isinstance(condition, dict) else condition
        entry = {"vector": V, "when": given if given is not None else {}}
        with pytest.raises(ValueError, match=said):
            generate(llm, [PROMPT], [params(1, steering_vectors=at(entry))])
    decided = {"vector": V, "when": {**good, "scope": "prompt"}}
    with pytest.raises(ValueError, match="move it to decode_steering_vectors"):
        generate(llm, [PROMPT], [params(1, prefill_steering_vectors=at(decided))])
    with pytest.raises(ValueError, match="prefill_vectors.*move it to decode_vectors"):
        llm.set_steering(prefill_vectors=at(decided))
    with pytest.raises(ValueError, match="may fire in the prompt"):
        llm.set_steering(at({"vector": V, "when": {**good, "scope": "rest"}}))
    many = [{"vector": V, "when": {**good, "above": n}} for n in range(9)]
    with pytest.raises(ValueError, match="9 distinct conditions"):
        generate(llm, [PROMPT], [params(1, steering_vectors=at(*many))])


def test_a_receipt_says_what_was_done_and_costs_nothing(steered: Any) -> None:
    llm, reference = steered
    case, size, before = CASES["named"], 2.0, llm.get_steering()["fired"]
    threshold = case.threshold(reference)
    gated = {"vector": V, "op": "project_out", "when": case.when(threshold)}
    spec = {"pre_attn": {1: {"vector": W, "scale": size}}, "post_attn": {1: [gated]}}
    fields: dict[str, Any] = {"steering_vectors": spec, "max_tokens": GENERATED}
    outputs = []
    for asked in (
        params(**fields),
        params(**fields, steering_receipt=True),
        params(GENERATED, steering_receipt=True),
    ):
        outputs += generate(llm, [PROMPT], [asked])
    plain, told, none = outputs
    assert plain.steering is None and none.steering == {"applied": [], "fired": {}}
    assert told.num_cached_tokens == 0
    assert torch.equal(logprobs(plain), logprobs(told)), "a receipt changes bits"
    doses: dict[str, torch.Tensor] = {}
    gates: list[torch.Tensor] = []

    def add(stream: torch.Tensor) -> torch.Tensor:
        changed = stream.double() + size * W.double()
        doses["add"] = (size * W.double()).norm() / stream.double().norm(dim=1)
        return changed.to(stream.dtype)

    def project(stream: torch.Tensor) -> torch.Tensor:
        gates.append(case.gate(reference.rows[case.tap], threshold))
        x = stream.double()
        change = gates[-1] * (x @ U)[:, None] * U
        doses["project_out"] = change.norm(dim=1) / x.norm(dim=1)
        return (x - change).to(stream.dtype)

    ids = (PROMPT + tokens(told))[:-1]
    reference.logprobs(ids, {(1, "pre_attn"): add, ACTS: project})
    applied = told.steering["applied"]
    places = {(e["layer"], e["hook"], e["op"]) for e in applied}
    assert places == {(1, "pre_attn", "add"), (*ACTS, "project_out")}
    for entry in applied:
        expected = doses[entry["op"]]
        acts = expected[expected > 0]
        assert entry["tokens"] == len(acts)
        assert entry["dose"]["mean"] == pytest.approx(float(acts.mean()), rel=1e-3)
        assert entry["dose"]["max"] == pytest.approx(float(acts.max()), rel=1e-3)
    open_ = gates[-1][:, 0].nonzero()[:, 0].tolist()
    (name, fired) = told.steering["fired"].popitem()
    assert name == "mood[1]" and 0 < len(open_) < len(ids)
    assert (fired["decided"], fired["tokens"]) == (len(ids), len(open_))
    assert fired["first"] == open_[0]
    counts = [
        {(e["probe"], e["layer"]): e["tokens"] for e in found}.get(("mood[1]", 0), 0)
        for found in (before, llm.get_steering()["fired"])
    ]
    assert counts[1] - counts[0] >= len(open_)


def test_a_decision_for_a_whole_request_counts_once(steered: Any) -> None:
    llm, _ = steered
    when = {"probe": PROBE, "layer": 0, "hook": "post_attn", "above": -1e6}
    entries = [{"vector": V, "when": {**when, "scope": s}} for s in ("prompt", "rest")]
    shut = {"vector": V, "when": {**when, "above": 1e6, "scope": "rest"}}
    asked = params(
        GENERATED, decode_steering_vectors=at(*entries, shut), steering_receipt=True
    )
    (output,) = generate(llm, [PROMPT], [asked])
    of = {
        (one["scope"], one["decided"]): (one["tokens"], one["first"])
        for one in output.steering["fired"].values()
    }
    fed = GENERATED - 1
    assert of["prompt", 1] == (1, SIZE - 1)
    assert sorted(
        (one["tokens"], one["first"] or 0)
        for one in output.steering["fired"].values()
        if one["scope"] == "rest"
    ) == [(0, 0), (fed, SIZE)]
    assert all(entry["tokens"] == fed for entry in output.steering["applied"][:2])
