# SPDX-License-Identifier: Apache-2.0
"""Hook points inside the block are read and written as by hooks in transformers.

Llama runs compiled, the others eagerly.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors import safe_open

from tests.support import models
from tests.support.captured import (
    LOGITS,
    CapturedEngine,
    asking_logits,
    check_effect,
    logprobs_of,
)
from tests.support.hf_reference import relative_error
from tests.support.inner_reference import InnerReference
from vllm import RequestOutput, SamplingParams
from vllm.v1.capture.consumers.arrow.table import rows_of
from vllm.v1.capture.consumers.filesystem.reader import read_request
from vllm.v1.capture.consumers.filesystem.store import CaptureStore
from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.readouts.errors import ReadoutValidationError
from vllm.v1.steering.conditions import is_known_at
from vllm.v1.steering.errors import SteeringValidationError

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS, WIDTH, HEADS, SIZE = 256, 64, 4, 32
PROMPT = [5, 9, 3, 77, 21, 8, 8, 40, 200, 17]
GENERATOR = torch.Generator().manual_seed(11)
OTHER = [9, 101, 3, 7, 65, 18, 99, 12, 4, 30]
SIZES = models.SIZES | {"num_attention_heads": HEADS, "num_key_value_heads": 2}


def llama() -> transformers.PretrainedConfig:
    return transformers.LlamaConfig(**SIZES)


def gemma2() -> transformers.PretrainedConfig:
    return transformers.Gemma2Config(
        **SIZES, sliding_window=8, query_pre_attn_scalar=32
    )


def mixtral() -> transformers.PretrainedConfig:
    return transformers.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=None)


def gptj() -> transformers.PretrainedConfig:
    return transformers.GPTJConfig(
        vocab_size=WORDS,
        n_embd=HEADS * SIZE,
        n_layer=2,
        n_head=HEADS,
        n_positions=128,
        rotary_dim=16,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


KINDS = {"llama": llama, "gemma2": gemma2, "mixtral": mixtral, "gptj": gptj}
LACKS = {
    "mixtral": {"mlp_act"},
    **{
        kind: {"router_logits", "expert_ids", "expert_weights"}
        for kind in ("llama", "gemma2", "gptj")
    },
}


class Pair:
    """An engine with all hook points, and the library's model."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self.kind, self.folder = kind, folder
        config = options.pop("config", None) or KINDS[kind]()
        model = models.save(config, folder)
        self.reference = InnerReference(model)
        self.engine = CapturedEngine(
            model,
            reference=self.reference,
            max_num_batched_tokens=64,
            capture_consumers=[
                "inline",
                f"filesystem:root={folder / 'files'}",
                f"arrow:root={folder / 'tables'},instance_name=tables",
                f"arrow:root={folder / 'own'},format=safetensors,instance_name=own",
            ],
            **LOGITS
            | {"hook_points": ["all", "after"], "enforce_eager": kind != "llama"}
            | {"enable_readouts": True}
            | options,
        )
        config = self.engine.llm.llm_engine.vllm_config.capture_config
        self.points: dict[int, list[str]] = config.hook_points or {}

    def ask(
        self,
        prompt: list[int] = PROMPT,
        steering: dict[str, Any] | None = None,
        hooks: Any = None,
        more: dict[str, Any] | None = None,
        **fields: Any,
    ) -> RequestOutput:
        spec = {"hooks": hooks or self.everywhere, "positions": "all"}
        params = asking_logits(
            4,
            capture={"keeper": spec, **(more or {})},
            steering_vectors=steering,
            **fields,
        )
        (output,) = self.engine.run([prompt], params)
        return output

    @property
    def everywhere(self) -> dict[str, list[int]]:
        names = sorted({name for names in self.points.values() for name in names})
        return {
            name: [layer for layer, names in self.points.items() if name in names]
            for name in names
        }

    def logits(self, output: RequestOutput) -> torch.Tensor:
        return logprobs_of(output, WORDS)

    def check_changed(
        self,
        tap: tuple[int, str],
        entry: dict[str, Any],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Steering has the effect on the logits that a hook has in the library."""
        layer, hook = tap
        output = self.ask(steering={hook: {layer: entry}})
        fed = [*PROMPT, *output.outputs[0].token_ids][:-1]
        plain = self.reference.run(fed)[len(PROMPT) - 1 :]
        expected = self.reference.run(fed, {tap: change})[len(PROMPT) - 1 :]
        check_effect(self.logits(output), plain, expected)


@pytest.fixture(scope="module", params=[*KINDS])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    opened = Pair(request.param, tmp_path_factory.mktemp(request.param))
    yield opened
    opened.engine.close()


def test_every_layer_has_every_point_that_its_kind_has(pair: Pair) -> None:
    inside = {"attn_in", "q", "k", "v", "z", "attn_out", "mlp_act", "router_logits"}
    wanted = inside | {"mlp_in", "mlp_out", "attn_add", "mlp_add"}
    for names in pair.points.values():
        assert wanted - LACKS[pair.kind] <= set(names)
        assert not LACKS[pair.kind] & set(names)
    assert "final_norm" in pair.points[1] and "final_norm" not in pair.points[0]
    assert "embed" in pair.points[0] and "embed" not in pair.points[1]


def test_what_is_added_sums_to_the_last_stream(pair: Pair) -> None:
    rows = pair.engine.rows(pair.ask())
    added = ((layer, hook) for layer in (0, 1) for hook in ("attn_add", "mlp_add"))
    summands = [rows[tap] for tap in ((0, "embed"), *added)]
    total = torch.stack(summands).float().sum(0)
    assert relative_error(total, rows[1, "post_block"].float()) < 1e-5


def test_rows_are_those_of_the_library(pair: Pair) -> None:
    output = pair.ask()
    pair.reference.run([*PROMPT, *output.outputs[0].token_ids][:-1])
    rows = pair.engine.rows(output)
    compared = rows.keys() & pair.reference.rows.keys()
    inner = {tap for tap in rows if tap[1] not in ("pre_attn", "post_attn")}
    assert inner <= compared
    for tap in compared:
        expected = pair.reference.rows[tap]
        assert relative_error(rows[tap].float(), expected) < 1e-4, tap
        width = pair.engine.sidecars(output)[tap]["hidden_size"]
        assert width == rows[tap].shape[1]
        others = [other for other in rows if other[1] == tap[1] and other != tap]
        for other in others:
            assert relative_error(rows[other].float(), expected) > 1e-2, tap


OTHER_WIDTH = {
    "mixtral": "router_logits",
    "gptj": "mlp_act",
    "llama": "q",
    "gemma2": "q",
}
"""A point whose rows are narrower or wider than the stream's."""


def written(pair: Pair, consumer: str, hooks: list[str], name: str, **keys: Any) -> Any:
    """Have a consumer write prompt rows; returns them as delivered to the caller."""
    spec = {"hooks": {hook: [0] for hook in hooks}, "positions": "all_prompt", **keys}
    params = SamplingParams(
        max_tokens=1,
        detokenize=False,
        capture={"inline": spec, consumer: {**spec, "request_id": name}},
        capture_wait=True,
    )
    (output,) = pair.engine.run([PROMPT], params)
    assert {one.status for one in output.capture_results.values()} == {"ok"}
    return output.capture_results["inline"].payload


def test_files_of_requests_have_rows_of_any_width(pair: Pair) -> None:
    hooks = ["post_block", OTHER_WIDTH[pair.kind], "attn_in"]
    rows = written(pair, "filesystem", hooks, "some")
    entries = read_request(next((pair.folder / "files").glob("*/some")))
    assert entries.keys() == rows.keys()
    assert len({one.shape for one in rows.values()}) == 2
    for tap, expected in rows.items():
        assert torch.equal(torch.as_tensor(entries[tap].array), expected), tap


def check_files(
    pair: Pair, hook: str, name: str, rows: torch.Tensor, **keys: Any
) -> None:
    """The files of one width have a point's rows, and say of which heads they are."""
    written(pair, "tables", [hook], name, **keys)
    written(pair, "own", [hook], name, **keys)
    (file,) = (pair.folder / "own").glob(f"*/{name}.safetensors")
    tables = map(pq.read_table, (pair.folder / "tables").glob("*/*.parquet"))
    (own,) = (one for one in tables if name in one["request_id"].to_pylist())
    assert set(own["hook"].to_pylist()) == {hook}
    assert torch.equal(rows_of(own), rows)
    with safe_open(file, "pt") as opened:
        assert torch.equal(opened.get_tensor("hidden_states")[:, 0], rows)
        if "heads" in keys:
            assert json.loads(opened.metadata()["heads"]) == keys["heads"]
            assert json.loads(own.schema.metadata[b"heads"]) == keys["heads"]


def test_files_of_one_width_have_it(pair: Pair) -> None:
    for hook in (OTHER_WIDTH[pair.kind], "post_block"):
        check_files(pair, hook, hook, written(pair, "own", [hook], "rows")[0, hook])


def test_heads_are_captured_in_the_order_in_which_they_are_listed(pair: Pair) -> None:
    whole = written(pair, "filesystem", ["q", "z"], "whole")
    part = written(pair, "filesystem", ["q", "z"], "part", heads=[3, 1])
    entries = read_request(next((pair.folder / "files").glob("*/part")))
    kept = [*range(3 * SIZE, 4 * SIZE), *range(SIZE, 2 * SIZE)]
    assert part.heads == [3, 1] and whole.heads == []
    for tap, rows in whole.items():
        assert torch.equal(part[tap], rows[:, kept])
        assert torch.equal(torch.as_tensor(entries[tap].array), rows[:, kept])
    stored = CaptureStore(pair.folder / "files")
    assert {one.heads for one in stored.select("part")} == {(3, 1)}
    assert {one.heads for one in stored.select("whole")} == {()}


def test_files_of_one_width_have_the_heads(pair: Pair) -> None:
    whole = written(pair, "own", ["v"], "v")[0, "v"]
    kv_heads = whole.shape[1] // SIZE
    for head in (0, kv_heads - 1):
        columns = slice(head * SIZE, (head + 1) * SIZE)
        check_files(pair, "v", f"v{head}", whole[:, columns], heads=[head])


@pytest.mark.parametrize(
    ("hooks", "heads", "part"),
    [
        (["z"], [HEADS], "heads 0 to 3"),
        (["z"], [0, 0], "listed twice"),
        (["z"], 1, "must list heads"),
        (["z", "post_block"], [0], "post_block do not consist of heads"),
    ],
)
def test_heads_that_are_not_there_are_refused(
    pair: Pair, hooks: list[str], heads: Any, part: str
) -> None:
    with pytest.raises(CaptureValidationError, match=part) as refused:
        written(pair, "own", hooks, "none", heads=heads)
    assert refused.value.parameter == "capture.inline.heads"


def read(pair: Pair, **readouts: Any) -> tuple[dict[str, Any], Any]:
    """The results of readouts over all positions, and the rows of all points."""
    asked = {name: {**one, "positions": "all"} for name, one in readouts.items()}
    output = pair.ask(readouts=asked)
    return output.readouts, pair.engine.rows(output)


def test_probes_read_rows_of_any_width_and_some_heads(pair: Pair) -> None:
    wide = pair.engine.rows(pair.ask())
    inside = [hook for layer, hook in wide if layer == 1]
    vectors = {
        hook: torch.randn(2, wide[1, hook].shape[1], generator=GENERATOR)
        for hook in inside
    }
    some = torch.randn(2, 2 * SIZE, generator=GENERATOR)
    probe = {"kind": "probe", "layer": 1}
    found, rows = read(
        pair,
        **{h: {**probe, "hook": h, "vectors": v.numpy()} for h, v in vectors.items()},
        heads={**probe, "hook": "z", "heads": [2, 0], "vectors": some.numpy()},
    )
    for hook, own in vectors.items():
        expected = rows[1, hook].double() @ own.double().T
        assert (
            relative_error(torch.tensor(found[hook].arrays["values"]), expected) < 1e-5
        ), hook
    part = rows[1, "z"].view(-1, HEADS, SIZE)[:, [2, 0]].flatten(1)
    expected = part.double() @ some.double().T
    assert (
        relative_error(torch.tensor(found["heads"].arrays["values"]), expected) < 1e-5
    )


def test_norms_and_rows_of_any_width(pair: Pair) -> None:
    last = {"final_norm": [1]}
    found, rows = read(
        pair,
        norm={"kind": "norm", "hooks": {"z": "all"}},
        head={"kind": "norm", "hooks": {"q": "all"}, "heads": [1]},
        last={"kind": "norm", "hooks": last},
        mean={"kind": "rows", "hooks": {"q": [1, 0]}, "reduce": "mean"},
        rows={"kind": "rows", "hooks": {"k": [0]}, "heads": [0]},
    )
    z = torch.stack([rows[0, "z"], rows[1, "z"]], 1).double()
    q = torch.stack([rows[0, "q"], rows[1, "q"]], 1).double()
    for name, own in {"norm": z, "head": q[..., SIZE : 2 * SIZE]}.items():
        norms = torch.tensor(found[name].arrays["norm"])
        cosines = torch.tensor(found[name].arrays["cosine"])
        assert relative_error(norms, own.norm(dim=-1)) < 1e-5
        expected = torch.cosine_similarity(own[:, 0], own[:, 1], dim=-1)
        assert relative_error(cosines[:, 1], expected) < 1e-5
        assert cosines[:, 0].isnan().all()
    norms = torch.tensor(found["last"].arrays["norm"])[:, 0]
    assert relative_error(norms, rows[1, "final_norm"].double().norm(dim=-1)) < 1e-5
    assert torch.tensor(found["last"].arrays["cosine"]).isnan().all()
    assert relative_error(torch.tensor(found["mean"].arrays["rows"]), q.mean(0)) < 1e-5
    part = torch.tensor(found["rows"].arrays["rows"])[:, 0]
    assert torch.equal(part.float(), rows[0, "k"][:, :SIZE].float())


def test_functions_get_rows_of_any_width(pair: Pair) -> None:
    custom = {"kind": "custom", "fn": lambda rows, context: rows.flatten(1)}
    found, rows = read(pair, mine={**custom, "hooks": {"z": "all"}, "heads": [3, 2]})
    own = [
        rows[layer, "z"].view(-1, HEADS, SIZE)[:, [3, 2]].flatten(1) for layer in (0, 1)
    ]
    values = torch.tensor(found["mine"].arrays["values"])
    assert torch.equal(values.float(), torch.cat(own, 1).float())


def test_a_lens_reads_what_is_as_wide_as_the_stream(pair: Pair) -> None:
    lens = {"kind": "lens", "layers": [1], "top_k": 3}
    found, _ = read(pair, lens={**lens, "hook": "mlp_add"})
    assert found["lens"].arrays["logprobs"].shape[-1] == 3
    with pytest.raises(ReadoutValidationError, match="as wide as the stream"):
        read(pair, lens={**lens, "hook": OTHER_WIDTH[pair.kind]})


@pytest.mark.parametrize(
    ("readout", "part"),
    [
        ({"kind": "norm", "hooks": {"post_block": [0], "z": [0]}}, "equally wide"),
        ({"kind": "norm", "hooks": {"z": [0]}, "heads": [HEADS]}, "heads 0 to 3"),
        ({"kind": "rows", "hooks": ["mlp_in.0"], "heads": [0]}, "consist of heads"),
        (
            {"kind": "probe", "layer": 0, "hook": "q", "vectors": [1.0] * WIDTH},
            f"width {HEADS * SIZE} of rows",
        ),
    ],
)
def test_readouts_that_do_not_fit_are_refused(
    pair: Pair, readout: dict[str, Any], part: str
) -> None:
    if pair.kind == "gptj":
        pytest.skip("its queries are as wide as the stream")
    with pytest.raises(ReadoutValidationError, match=part):
        read(pair, some=readout)


@pytest.mark.parametrize("hook", ["q", "z", "attn_out", "attn_add", "post_block"])
def test_a_condition_reads_and_gates_inside_the_block(pair: Pair, hook: str) -> None:
    pair.reference.run(PROMPT)
    width = pair.reference.rows[0, "z"].shape[1]
    probe = torch.randn(width, generator=GENERATOR)
    if hook in ("q", "attn_in"):  # Computed before `z` is known.
        reads = "pre_attn"
        probe = torch.randn(pair.reference.rows[0, "embed"].shape[1])
    else:
        reads = "z"
    source = (0, "embed" if reads == "pre_attn" else reads)
    seen = pair.reference.rows[source].float() @ probe
    bound = float(seen.median() + 1e-3)
    target = pair.reference.rows[0, hook].shape[1]
    vector = torch.randn(target, generator=GENERATOR) * 5
    when = {"probe": probe.numpy(), "layer": 0, "hook": reads, "above": bound}

    def change(rows: torch.Tensor) -> torch.Tensor:
        fires = pair.reference.rows[source].float() @ probe > bound
        assert fires.any() and not fires.all()
        return torch.where(fires[:, None], rows + vector, rows)

    pair.check_changed((0, hook), {"vector": vector.numpy(), "when": when}, change)


def test_a_condition_that_is_not_yet_known_is_refused(pair: Pair) -> None:
    width = pair.reference.rows[0, "z"].shape[1]
    when = {"probe": [1.0] * width, "layer": 0, "hook": "z", "above": 0.0}
    entry = {"op": "replace", "vector": 0, "heads": [0], "when": when}
    with pytest.raises(SteeringValidationError, match="not known when the entry acts"):
        pair.ask(steering={"q": {0: entry}})
    with pytest.raises(SteeringValidationError, match=f"{width}"):
        wrong = {**when, "probe": [1.0] * (width + 1)}
        pair.ask(steering={"z": {0: {**entry, "when": wrong}}})


def test_places_are_computed_in_the_order_that_conditions_assume(pair: Pair) -> None:
    pair.reference.run(PROMPT)
    computed = list(pair.reference.rows)
    claimed = [
        (first, second)
        for first in computed
        for second in computed
        if first != second and is_known_at(first, second)
    ]
    assert len(claimed) > len(computed)
    for first, second in claimed:
        assert computed.index(first) < computed.index(second), (first, second)


@pytest.mark.parametrize("consumer", ["tables", "own"])
def test_rows_of_several_widths_do_not_go_into_one_file(
    pair: Pair, consumer: str
) -> None:
    hooks = ["post_block", OTHER_WIDTH[pair.kind]]
    with pytest.raises(CaptureValidationError, match="equally wide") as refused:
        written(pair, consumer, hooks, "mixed")
    assert refused.value.parameter == f"capture.{consumer}.hooks"


def test_the_engine_tells_the_other_widths(pair: Pair) -> None:
    told = pair.engine.llm.llm_engine.capture.describe()["other_widths"]
    rows = pair.engine.rows(pair.ask())
    width = rows[0, "post_block"].shape[1]
    widths = {f"{hook}.{layer}": one.shape[1] for (layer, hook), one in rows.items()}
    assert told == {name: own for name, own in widths.items() if own != width}


def test_a_head_is_zeroed(pair: Pair) -> None:
    def zero(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[:, SIZE : 2 * SIZE] = 0
        return rows

    entry = {"op": "replace", "vector": 0, "heads": [1]}
    pair.check_changed((0, "z"), entry, zero)


def test_a_head_has_another_run_s_values(pair: Pair) -> None:
    pair.reference.run(OTHER)
    theirs = pair.reference.rows[0, "z"][4].clone()

    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[3, : 2 * SIZE] = theirs[: 2 * SIZE]
        return rows

    entry = {
        "op": "replace",
        "vectors": theirs[None, : 2 * SIZE].numpy(),
        "positions": [3],
        "heads": [0, 1],
    }
    pair.check_changed((0, "z"), entry, change)


@pytest.mark.parametrize(
    "hook",
    ["q", "k", "v", "attn_in", "attn_out", "mlp_out", "embed", "attn_add", "mlp_add"],
)
def test_additions_reach_what_the_point_names(pair: Pair, hook: str) -> None:
    check_addition(pair, hook)


def check_addition(pair: Pair, hook: str) -> None:
    """A vector is added to the rows of a point at two positions."""
    width = pair.reference.rows[0, hook].shape[1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(3)) * 3
    # The same addition to all keys would change no weight.
    entry = {"vector": vector.numpy(), "positions": [2, 5]}

    def change(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[[2, 5]] += vector
        return rows

    pair.check_changed((0, hook), entry, change)


@pytest.mark.parametrize("hook", ["mlp_act", "final_norm"])
def test_a_vector_is_added_before_a_projection(pair: Pair, hook: str) -> None:
    if hook in LACKS[pair.kind]:
        pytest.skip("routed experts have no mlp_act")
    width = pair.reference.rows[1, hook].shape[1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(4)) * 5
    pair.check_changed(
        (1, hook), {"vector": vector.numpy()}, lambda rows: rows + vector
    )


def test_the_router_is_told_which_experts_to_take(pair: Pair) -> None:
    if pair.kind != "mixtral":
        pytest.skip("no router")
    logits = torch.tensor([0.0, 9.0, -2.0, 7.0])
    entry = {"op": "replace", "vector": logits.numpy()}
    pair.check_changed((0, "router_logits"), entry, lambda rows: logits.expand_as(rows))


def test_weights_of_the_chosen_experts_are_changed(pair: Pair) -> None:
    if pair.kind != "mixtral":
        pytest.skip("no router")
    own = {"vector": np.array([0.5, -0.25], np.float32)}
    pair.check_changed(
        (0, "expert_weights"), own, lambda rows: rows + torch.tensor([0.5, -0.25])
    )
    swapped = {"op": "replace", "vector": np.array([0.2, 0.8], np.float32)}
    wanted = torch.tensor([0.2, 0.8])
    pair.check_changed((1, "expert_weights"), swapped, lambda r: wanted.expand_as(r))


def test_weights_of_experts_have_the_factor_of_their_sum(tmp_path: Path) -> None:
    """Upstream multiplies the sum of the experts; the library's weights have it."""
    config = transformers.Glm4MoeConfig(
        **SIZES,
        first_k_dense_replace=0,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=32,
        routed_scaling_factor=2.5,
    )
    pair = Pair("glm", tmp_path, config=config)
    try:
        output = pair.ask()
        pair.reference.run([*PROMPT, *output.outputs[0].token_ids][:-1])
        wanted = pair.reference.rows[1, "expert_weights"].sort(-1).values
        assert wanted.sum(-1).min() > 2.4
        rows = pair.engine.rows(output)[1, "expert_weights"].sort(-1).values
        torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=0)
        given = torch.tensor([0.9, 0.9])
        entry = {"op": "replace", "vector": given.numpy()}
        pair.check_changed(
            (1, "expert_weights"), entry, lambda rows: given.expand_as(rows)
        )
    finally:
        pair.engine.close()


def test_ids_of_experts_are_read_only(pair: Pair) -> None:
    if pair.kind != "mixtral":
        pytest.skip("no router")
    with pytest.raises(SteeringValidationError, match="read-only.*router_logits"):
        pair.ask(steering={"expert_ids": {0: [1.0, 2.0]}})


@pytest.mark.parametrize(
    ("hook", "entry", "part"),
    [
        ("z", {"op": "replace", "vector": 0, "heads": [HEADS]}, "heads 0 to 3"),
        ("z", {"op": "replace", "vector": 0, "heads": [1, 1]}, "listed twice"),
        ("z", {"op": "replace", "vector": 0, "heads": []}, "must list heads"),
        (
            "post_block",
            {"op": "replace", "vector": 0, "heads": [0]},
            "consist of heads",
        ),
        ("attn_out", {"vector": [1.0] * 65}, "65"),
        ("z", {"vector": [1.0] * WIDTH, "heads": [0]}, "64"),
    ],
)
def test_what_does_not_fit_is_refused(
    pair: Pair, hook: str, entry: dict[str, Any], part: str
) -> None:
    with pytest.raises(SteeringValidationError, match=part):
        pair.ask(steering={hook: {0: entry}})


def test_a_point_that_the_model_lacks_is_refused_by_name(pair: Pair) -> None:
    for missing in LACKS[pair.kind]:
        why = "inside of one kernel" if missing == "mlp_act" else "no routed experts"
        with pytest.raises(CaptureValidationError, match=f"{missing}.*{why}"):
            pair.ask(hooks={missing: [0]})
        with pytest.raises(SteeringValidationError, match=f"{missing}.*{why}"):
            pair.ask(steering={missing: {0: [1.0] * WIDTH}})


STREAM = ("pre_attn", "post_attn", "post_block")


def changing_everywhere(pair: Pair) -> dict[str, Any]:
    """An addition and a projection at each point of the stream, of both layers."""
    some = torch.Generator().manual_seed(11)
    width = pair.engine.llm.model_config.get_hidden_size()
    return {
        hook: {
            layer: {"op": op, "vector": torch.randn(width, generator=some).numpy()}
            for layer, op in ((0, "add"), (1, "project_out"))
        }
        for hook in STREAM
    }


def test_rows_behind_an_intervention_are_what_the_block_goes_on_with(
    pair: Pair,
) -> None:
    spec = {"hooks": dict.fromkeys(STREAM, "all"), "positions": "all", "after": True}
    output = pair.ask(
        steering=changing_everywhere(pair),
        more={"inline": spec},
        readouts={"seen": {"kind": "lens", "layers": [1], "top_k": 3, "after": True}},
    )
    before = {tap: one.float() for tap, one in pair.engine.rows(output).items()}
    payload = output.capture_results["inline"].payload
    after = {tap: one.float() for tap, one in payload.items()}
    assert sorted(after) == [
        (layer, hook) for layer in (0, 1) for hook in sorted(STREAM)
    ]
    for layer in (0, 1):
        for start, added, end in (
            ("pre_attn", "attn_add", "post_attn"),
            ("post_attn", "mlp_add", "post_block"),
        ):
            expected = after[layer, start] + before[layer, added]
            assert relative_error(before[layer, end], expected) < 1e-5
            assert relative_error(before[layer, start], after[layer, start]) > 1e-3
    assert torch.equal(after[0, "post_block"], before[1, "pre_attn"])
    seen = output.outputs[0].readouts["seen"]
    assert seen.note is None
    logits = pair.logits(output)[1:].log_softmax(-1)
    best = logits.topk(3)
    assert torch.equal(torch.as_tensor(seen.arrays["token_ids"])[:, 0], best.indices)
    found = torch.as_tensor(seen.arrays["logprobs"])[:, 0]
    assert torch.allclose(found, best.values, atol=1e-4)


def test_rows_behind_a_point_without_intervention_are_those_before(pair: Pair) -> None:
    spec = {"hooks": pair.everywhere, "positions": "all", "after": True}
    output = pair.ask(more={"inline": spec})
    before = pair.engine.rows(output)
    after = output.capture_results["inline"].payload
    assert after.keys() == before.keys()
    for tap in before:
        assert torch.equal(after[tap], before[tap]), tap
    assert not any("after" in own for own in pair.engine.sidecars(output).values())


def test_a_readout_says_that_it_does_not_see_a_change(pair: Pair) -> None:
    spec = {"kind": "norm", "hooks": {"post_block": [1]}}
    output = pair.ask(
        steering=changing_everywhere(pair),
        readouts={
            "neither": spec,
            "before": spec | {"after": False},
            "after": spec | {"after": True},
        },
    )
    results = output.outputs[0].readouts
    assert '"after": true' in results["neither"].note
    assert results["before"].note is None and results["after"].note is None
    norms = {name: one.arrays["norm"] for name, one in results.items()}
    assert (norms["neither"] == norms["before"]).all()
    assert (norms["after"] != norms["before"]).all()
