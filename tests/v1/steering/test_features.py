# SPDX-License-Identifier: Apache-2.0
"""SAE features are set, added to and scaled like hooks in transformers do it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.inner_reference import InnerReference
from tests.v1.residual.sae import _layouts
from tests.v1.steering import _models
from tests.v1.steering._engine import compared, generate, logprobs, params
from tests.v1.steering._saes import (
    FEATURES,
    NAMES,
    PLACE,
    SELECTING,
    TAP,
    TRANSCODERS,
)
from vllm.v1.residual.sae import SparseAutoencoder, encode, load_sae

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = [(5 * i + 3) % _models.VOCAB for i in range(41)]
SIZE = len(PROMPT)
GENERATED = 6


@pytest.fixture
def featured(
    steered: Any, sae_paths: dict[str, str]
) -> tuple[Any, InnerReference, dict[str, SparseAutoencoder]]:
    """The shared engine, its reference and its SAEs."""
    return *steered, {name: load_sae(one) for name, one in sae_paths.items()}


Wanted = dict[int, tuple[str, float, bool]]
"""Mode, value and `only_if_active`, by feature."""


def change_of(sae: SparseAutoencoder, wanted: Wanted, x: torch.Tensor) -> torch.Tensor:
    """What the wanted activations for rows `x` add, less the size of normed rows."""
    activations = encode(sae, x).double()
    change = torch.zeros(len(x), sae.w_dec.shape[1]).double()
    for feature, (mode, value, only) in wanted.items():
        a = activations[:, feature]
        new = {"set": torch.full_like(a, value), "add": a + value, "scale": a * value}
        amount = new[mode] - a
        amount = amount * (a != 0) if only else amount
        change += amount[:, None] * sae.w_dec[feature].double()
    return change


def changed(sae: SparseAutoencoder, wanted: Wanted, x: torch.Tensor) -> torch.Tensor:
    """The changed stream, where the SAE reads and writes it, in float64."""
    x = x.double()
    size = torch.ones(len(x), 1).double()
    if sae.input_norm == "constant_norm_rescale":
        size = x.norm(dim=-1, keepdim=True) / sae.d_in**0.5
    elif sae.input_norm == "layer_norm":
        size = x.std(dim=-1, keepdim=True)
    return x + size * change_of(sae, wanted, x)


def entries(name: str, wanted: Wanted, tap: tuple[int, str] = TAP) -> dict[str, Any]:
    layer, hook = tap
    made = [
        {
            "op": "feature",
            "sae": name,
            "feature": feature,
            "value": value,
            "mode": mode,
            "only_if_active": only,
        }
        for feature, (mode, value, only) in wanted.items()
    ]
    return {hook: {layer: made}}


def active(reference: Any, sae: SparseAutoencoder) -> list[int]:
    """Features that are active at some of the prompt's tokens only."""
    found = encode(sae, reference.rows_at(PROMPT, TAP))
    share = (found != 0).double().mean(dim=0)
    order = (share - 0.5).abs().argsort()
    return [int(feature) for feature in order[:3]]


def test_features_are_set_added_to_and_scaled(featured: Any) -> None:
    llm, reference, saes = featured
    cases: list[tuple[str, Wanted]] = []
    for name, sae in saes.items():
        if sae.is_transcoder:
            continue
        first, second, third = active(reference, sae)
        cases += [
            (name, {first: ("set", 5.0, False)}),
            (name, {first: ("set", 0.0, False), second: ("add", 3.0, True)}),
            (name, {third: ("scale", -2.0, False), first: ("set", 4.0, False)}),
            (name, {second: ("add", 2.0, False), third: ("set", 3.0, True)}),
        ]
    sampling = [
        params(GENERATED, steering_vectors=entries(name, wanted))
        for name, wanted in cases
    ]
    outputs = generate(llm, [PROMPT] * len(cases), sampling)
    for (name, wanted), output in zip(cases, outputs, strict=True):

        def change(x: torch.Tensor, name: str = name, wanted: Any = wanted) -> Any:
            several = wanted
            if len({only for _, _, only in wanted.values()}) == 1:
                return changed(saes[name], several, x).to(x.dtype)
            for one in several.items():  # Applied one after another, as written.
                x = changed(saes[name], dict([one]), x).to(x.dtype)
            return x

        wrong, effect = compared(output, reference, {TAP: change})
        assert wrong < 1e-4 and effect > 1e-3, (name, wanted)


@pytest.mark.parametrize("name", [*TRANSCODERS, *SELECTING])
def test_a_transcoder_reads_in_one_place_and_writes_in_another(
    featured: Any, name: str
) -> None:
    llm, reference, saes = featured
    sae = saes[name]
    reads, writes = sae.reads.tap, sae.writes.tap
    probe = torch.randn(_models.HIDDEN, generator=torch.Generator().manual_seed(1))
    share = (encode(sae, reference.rows_at(PROMPT, reads)) != 0).double().mean(dim=0)
    first, second, *_ = map(int, (share - 0.5).abs().argsort())
    decides = (writes[0], "pre_attn")
    layer, hook = decides
    when = {"probe": probe, "layer": layer, "hook": hook, "above": 0.0}
    cases: list[tuple[Wanted, Any]] = [
        ({first: ("set", 5.0, False), second: ("scale", -2.0, False)}, None),
        ({first: ("add", 3.0, True), second: ("add", 2.0, False)}, None),
        ({first: ("set", 5.0, False)}, when),
    ]
    sampling = []
    for wanted, gate in cases:
        spec = entries(name, wanted, writes)
        for entry in spec[writes[1]][writes[0]]:
            entry |= {} if gate is None else {"when": gate}
        sampling.append(params(GENERATED, steering_vectors=spec))
    outputs = generate(llm, [PROMPT] * len(cases), sampling)
    for (wanted, gate), output in zip(cases, outputs, strict=True):

        def act(x: torch.Tensor, wanted: Any = wanted, gate: Any = gate) -> Any:
            change = change_of(sae, wanted, reference.rows[reads].double())
            if gate is not None:
                change *= (reference.rows[decides] @ probe > 0)[:, None]
            return (x.double() + change).to(x.dtype)

        wrong, effect = compared(output, reference, {writes: act})
        assert wrong < 1e-4 and effect > 1e-3, wanted


def test_the_engine_steers_all_by_a_feature_and_keeps_its_sae(featured: Any) -> None:
    llm, reference, saes = featured
    (feature, *_) = active(reference, saes["jump"])
    wanted: Wanted = {feature: ("set", 4.0, False)}
    (asked,) = generate(
        llm, [PROMPT], [params(GENERATED, steering_vectors=entries("jump", wanted))]
    )
    told = llm.set_steering(entries("jump", wanted))
    try:
        (one,) = told["applied"]
        assert (one["sae"], one["feature"], one["mode"]) == ("jump", feature, "set")
        (found,) = generate(llm, [PROMPT], [params(GENERATED)])
        assert torch.equal(logprobs(found), logprobs(asked))
        with pytest.raises(ValueError, match="clear them first"):
            llm.unregister_readout_module("jump")
    finally:
        llm.clear_steering()


def test_a_receipt_has_one_dose_for_features_that_are_changed_together(
    featured: Any,
) -> None:
    llm, reference, saes = featured
    first, second, third = active(reference, saes["jump"])
    together: Wanted = {first: ("set", 9.0, False), second: ("add", 5.0, False)}
    wanted = together | {third: ("set", 7.0, True)}
    spec = entries("jump", wanted)
    asked = params(1, steering_vectors=spec, steering_receipt=True)
    x = reference.rows_at(PROMPT, TAP).double()
    change = changed(saes["jump"], together, x) - x
    (output,) = generate(llm, [PROMPT], [asked])
    both, _ = output.steering["applied"]
    dose = float((change.norm(dim=-1) / x.norm(dim=-1)).mean())
    assert both["tokens"] == SIZE
    assert both["dose"]["mean"] == pytest.approx(dose, rel=1e-4)


def test_an_sae_is_registered_while_serving(featured: Any, tmp_path: Path) -> None:
    llm, _, _ = featured
    parts = _layouts.parts(5, _models.HIDDEN, FEATURES)
    folder = _layouts.saelens(
        tmp_path / "later",
        _layouts.chosen(parts, *NAMES),
        architecture="standard",
        metadata=PLACE,
        d_in=_models.HIDDEN,
    )
    asked = params(2, steering_vectors=entries("later", {3: ("set", 4.0, False)}))
    with pytest.raises(ValueError, match="no SAE is named 'later'"):
        generate(llm, [PROMPT], [asked])
    llm.register_readout_module("later", str(folder))
    (steered_output,) = generate(llm, [PROMPT], [asked])
    (plain,) = generate(llm, [PROMPT], [params(2)])
    assert not torch.equal(logprobs(steered_output), logprobs(plain))
    llm.unregister_readout_module("later")
    with pytest.raises(ValueError, match="no SAE is named 'later'"):
        generate(llm, [PROMPT], [asked])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sae": "unheard"}, "no SAE is named"),
    ({"sae": 3}, "the name of an SAE"),
    ({"feature": FEATURES}, "features 0 to 199"),
    ({"feature": -1}, "features 0 to 199"),
    ({"feature": True}, "features 0 to 199"),
    ({"value": float("nan")}, "finite"),
    ({"value": "much"}, "finite"),
    ({"mode": "multiply"}, "not one of"),
    ({"only_if_active": 1}, "a boolean"),
    ({"scale": 2}, "goes with"),
]


def test_bad_features_are_refused_before_anything_is_scheduled(featured: Any) -> None:
    llm, _, _ = featured
    good = {"op": "feature", "sae": "jump", "feature": 3, "value": 1.0}
    for change, said in BAD:
        spec = {"post_block": {1: {**good, **change}}}
        with pytest.raises(ValueError, match=said):
            generate(llm, [PROMPT], [params(1, steering_vectors=spec)])
    elsewhere = {"post_attn": {1: {**good, "sae": "within"}}}
    with pytest.raises(ValueError, match="writes to post_block of layer 1"):
        generate(llm, [PROMPT], [params(1, steering_vectors=elsewhere)])
    many = [{**good, "sae": "within", "feature": n} for n in range(17)]
    with pytest.raises(ValueError, match="17 activations of transcoders"):
        generate(llm, [PROMPT], [params(1, steering_vectors={"post_block": {1: many}})])
    for place in ({"post_block": {2: good}}, {"pre_attn": {1: good}}):
        with pytest.raises(ValueError, match="was trained at post_block of layer 1"):
            generate(llm, [PROMPT], [params(1, steering_vectors=place)])
