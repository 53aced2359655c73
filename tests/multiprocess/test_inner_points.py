# SPDX-License-Identifier: Apache-2.0
"""Points inside the block, whose rows two tensor-parallel ranks divide.

Rows are whole, in order and those of Transformers; vectors reach the right rank. One
model has a KV head for each rank, the other one that both ranks have.
"""

import re
from collections.abc import Iterator

import pytest
import torch
import transformers

from tests.v1.capture.engine.test_inner_points import (  # noqa: F401
    HEADS,
    OTHER,
    PROMPT,
    SIZE,
    SIZES,
    Pair,
    check_addition,
    test_a_condition_reads_and_gates_inside_the_block,
    test_probes_read_rows_of_any_width_and_some_heads,
    test_rows_are_those_of_the_library,
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.timeout(900),
]
DIVIDED = ("q", "k", "v", "z", "mlp_act")


@pytest.fixture(scope="module", params=[2, 1])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    sizes = {**SIZES, "num_key_value_heads": request.param}
    opened = Pair(
        "llama",
        tmp_path_factory.mktemp(f"kv{request.param}"),
        config=transformers.LlamaConfig(**sizes),
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        # The second model runs compiled.
        enforce_eager=request.param == 2,
        worker_extension_cls="tests.multiprocess.breaking.Breaking",
    )
    yield opened
    opened.engine.close()


@pytest.mark.parametrize("hook", DIVIDED)
def test_additions_reach_the_ranks(pair: Pair, hook: str) -> None:
    pair.reference.run(PROMPT)
    check_addition(pair, hook)


def test_rows_of_another_run_replace_those_of_some_heads(pair: Pair) -> None:
    pair.reference.run(OTHER)
    theirs = pair.reference.rows[0, "z"][[4, 6], SIZE:].clone()

    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[[3, 1], SIZE:] = theirs
        return rows

    entry = {
        "op": "replace",
        "vectors": theirs.numpy(),
        "positions": [3, 1],
        "heads": [1, 2, 3],
    }
    pair.check_changed((0, "z"), entry, change)


@pytest.mark.parametrize("hook", DIVIDED)
def test_operations_act_on_whole_rows(pair: Pair, hook: str) -> None:
    pair.reference.run(PROMPT)
    vector = torch.randn(pair.reference.rows[0, hook].shape[1])
    unit = vector / vector.norm()

    def project(rows: torch.Tensor) -> torch.Tensor:
        return rows - (rows @ unit)[:, None] * unit

    def clamp(rows: torch.Tensor) -> torch.Tensor:
        found = rows @ unit
        return rows + (found.clamp(-0.1, 0.1) - found)[:, None] * unit

    def match(rows: torch.Tensor) -> torch.Tensor:
        return rows + 2 * rows.norm(dim=-1, keepdim=True) * unit

    own = vector.numpy()
    pair.check_changed((0, hook), {"op": "project_out", "vector": own}, project)
    bounds = {"min": -0.1, "max": 0.1}
    pair.check_changed((0, hook), {"op": "clamp", "vector": own, **bounds}, clamp)
    matched = {"vector": own, "norm_match": True, "scale": 2.0}
    pair.check_changed((0, hook), matched, match)


def test_a_receipt_measures_whole_rows(pair: Pair) -> None:
    vector = torch.randn(HEADS * SIZE)
    output = pair.ask(steering={"z": {0: vector.numpy()}}, steering_receipt=True)
    (applied,) = output.steering["applied"]
    doses = vector.norm() / pair.engine.rows(output)[0, "z"].float().norm(dim=-1)
    assert applied["hook"] == "z"
    assert applied["dose"]["max"] == pytest.approx(float(doses.max()), rel=1e-3)


def test_patterns_of_the_heads_of_all_ranks(pair: Pair) -> None:
    spec = {"kind": "attention", "layers": [0, 1]}
    full = {**spec, "layers": [1], "heads": [3, 0, 1], "full": True}
    asked = {"top": {**spec, "top_k": 64}, "full": full}
    output = pair.ask(
        readouts={n: {**one, "positions": "all"} for n, one in asked.items()}
    )
    found = output.readouts
    pair.reference.run([*PROMPT, *output.outputs[0].token_ids][:-1])
    rows = len(found["top"].positions)
    expected = torch.stack([pair.reference.patterns[n] for n in (0, 1)])
    own = found["full"]["weights"]
    torch.testing.assert_close(
        torch.from_numpy(own.copy())[..., :rows],
        expected[1][[3, 0, 1], :rows, :rows],
        atol=1e-4,
        rtol=0,
    )
    weights, keys = found["top"]["weights"], found["top"]["keys"]
    for layer in (0, 1):
        for head in range(HEADS):
            row = torch.zeros(rows, rows + 1)
            at = torch.from_numpy(keys[:, layer, head].copy()).long()
            at = torch.where(at < 0, rows, at)
            row.scatter_(1, at, torch.from_numpy(weights[:, layer, head].copy()))
            torch.testing.assert_close(
                row[:, :rows], expected[layer, head, :rows, :rows], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("rank", [0, 1])
def test_patterns_that_one_rank_cannot_compute_are_an_error_of_their_readout(
    pair: Pair, rank: int
) -> None:
    spec = {"kind": "attention", "positions": "all"}
    asked = {"top": spec, "full": {**spec, "layers": [1], "full": True}}
    more = {"norm": {"kind": "norm", "hooks": {"post_block": "all"}}}
    rpc = pair.engine.llm.collective_rpc
    rpc("fail_patterns", args=(rank,))
    try:
        broken = pair.ask(readouts={**asked, **more}).readouts
    finally:
        rpc("fail_patterns", args=(None,))
    mended = pair.ask(readouts={**asked, **more}).readouts
    for name in asked:
        assert re.search("no room|another .* rank", broken[name].error or ""), name
        assert not broken[name].arrays
        assert mended[name].error is None and len(mended[name]["weights"])
    assert broken["norm"].error is None
    torch.testing.assert_close(broken["norm"]["norm"], mended["norm"]["norm"])


@pytest.fixture
def gathering(pair: Pair, request: pytest.FixtureRequest) -> Iterator[None]:
    """Logits are gathered whole, or the best of those of each rank."""
    if request.param:
        pair.engine.llm.collective_rpc("gather_logits", args=(True,))
    yield
    if request.param:
        pair.engine.llm.collective_rpc("gather_logits", args=(False,))


@pytest.mark.parametrize(
    ("place", "rank", "gathering"),
    [
        ("rows", 0, False),
        ("norm", 0, False),
        ("norm", 1, False),
        ("share", 1, False),
        ("whole", 0, False),
        ("rows", 0, True),
        ("norm", 1, True),
        ("share", 0, True),
    ],
    indirect=["gathering"],
)
def test_a_lens_that_one_rank_cannot_compute_is_an_error_of_its_readout(
    pair: Pair, place: str, rank: int, gathering: None
) -> None:
    asked = {"lens": {"kind": "lens", "positions": "all"}}
    rpc = pair.engine.llm.collective_rpc
    rpc("fail_lens", args=(rank, place, True))
    try:
        broken = pair.ask(readouts=asked).readouts["lens"]
    finally:
        rpc("fail_lens", args=(rank, place, False))
    mended = pair.ask(readouts=asked).readouts["lens"]
    assert re.search("no room|another .* rank", broken.error or "")
    assert not broken.arrays
    assert mended.error is None and len(mended["token_ids"])
