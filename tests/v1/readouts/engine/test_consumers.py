# SPDX-License-Identifier: Apache-2.0
"""Consumers take the same results of readouts as the output, beside its rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.support.captured import CapturedEngine, prompt
from tests.v1.readouts._reading import LAYERS, read_out
from vllm import RequestOutput
from vllm.v1.capture.consumers.arrow.table import rows_of
from vllm.v1.capture.consumers.filesystem.reader import load_index, read_request
from vllm.v1.capture.consumers.filesystem.store import CaptureStore
from vllm.v1.capture.results import RowsByTap
from vllm.v1.readouts.results import ReadoutResult

pytestmark = pytest.mark.e2e

PROMPTS = [prompt(50, 1), prompt(7, 2), prompt(13, 3)]
"""Prompts, of which the first takes several steps."""

LENS = {"kind": "lens", "top_k": 3, "tokens": [5], "positions": "all"}
SPECS: dict[str, Any] = {
    "lens": LENS,
    "probe": {"kind": "probe", "probe": "direction", "positions": "all"},
    "norm": {"kind": "norm", "hooks": {"post_block": [0, 2]}},
    "sae": {"kind": "sae", "sae": "jump", "top_k": 4, "positions": "all_prompt"},
    "mean": {
        "kind": "rows",
        "hooks": {"post_block": [1]},
        "reduce": "mean",
        "positions": "all",
    },
}
PARTS = {"kind": "attribution", "tokens": [5, 7], "positions": "all"}
"""A readout with a component that is no hook point: `rest`."""


def as_keys(readouts: Mapping[str, ReadoutResult]) -> dict[tuple[int, str], Any]:
    """The arrays of an output, by the key under which a consumer takes them."""
    found = {}
    for name, result in readouts.items():
        for label, array in result.arrays.items():
            for number, (layer, hook) in enumerate(result.taps):
                own = array if result.kind in ("probe", "sae") else array[:, number]
                if result.kind == "rows":
                    own = array[number : number + 1]
                values = torch.from_numpy(np.ascontiguousarray(own))
                key = layer, f"{hook}.{name}.{label}"
                found[key] = values.reshape(len(values), -1)
    return found


def check_payload(payload: Any, readouts: Mapping[str, ReadoutResult]) -> None:
    """An `inline` payload has exactly the results of the output, besides rows."""
    assert isinstance(payload, RowsByTap)
    found = {key: rows for key, rows in payload.items() if "." in key[1]}
    expected = as_keys(readouts)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, rtol=0, atol=0, equal_nan=True)
        told = readouts[key[1].split(".")[1]]
        reduced = told.kind == "rows"
        positions = told.positions[-1:] if reduced else told.positions
        assert payload.positions[key] == positions
        assert len(payload.token_ids[key]) == len(positions)


def captured(
    engine: CapturedEngine, capture: dict[str, Any], **options: Any
) -> list[RequestOutput]:
    chosen = {"capture": capture, "capture_wait": True} | options
    return read_out(engine, PROMPTS, SPECS, **chosen)


def test_inline_returns_results_with_rows_and_without(engine: CapturedEngine) -> None:
    rows = {"hooks": {"post_block": [1]}, "positions": "all"}
    both = {"inline": rows | {"readouts": "all"}}
    for output in captured(engine, both):
        payload = output.capture_results["inline"].payload
        check_payload(payload, output.readouts)
        fed = len(output.prompt_token_ids or ()) + 7
        assert payload[1, "post_block"].shape == (fed, 64)
    for output in captured(engine, {"inline": {"readouts": ["lens", "norm"]}}):
        kept = {name: output.readouts[name] for name in ("lens", "norm")}
        check_payload(output.capture_results["inline"].payload, kept)


@pytest.mark.parametrize("layout", ["per_file", "packed", "sharded"])
def test_files_have_the_layout_of_rows(
    engine: CapturedEngine, files: Path, layout: str
) -> None:
    spec = {"tag": layout, "layout": layout, "readouts": "all"}
    hooks = {} if layout == "packed" else {"hooks": {"post_block": [1]}}
    capture = {"filesystem": spec | hooks}
    specs = SPECS | {"parts": PARTS}
    outputs = read_out(engine, PROMPTS, specs, capture=capture, capture_wait=True)
    for output in outputs:
        result = output.capture_results["filesystem"]
        assert result.status == "ok", result.error
        name = output.request_id
        (root,) = [
            r for r in Path(files).glob("*/files") if str(r) in result.payload[0]
        ]
        stored = read_request(root, layout, name)
        rows = {key for key in stored if "." not in key[1]}
        assert rows == ({(1, "post_block")} if hooks else set())
        expected = as_keys(output.readouts)
        assert stored.keys() == rows | expected.keys()
        for key, values in expected.items():
            torch.testing.assert_close(
                stored[key], values, rtol=0, atol=0, equal_nan=True
            )
        place = 2, "post_block.lens.token_ids"
        found = CaptureStore(root).one(name, *place, tag=layout)
        assert found.to_torch().equal(expected[place])
        assert found.positions == output.readouts["lens"].positions
    index = load_index(Path(outputs[0].capture_results["filesystem"].payload[-1]))
    entries = index.get("entries", [index])
    told = [one["readout"] for one in entries if "readout" in one]
    assert {one["kind"] for one in told} <= {one["kind"] for one in specs.values()}


def test_a_table_has_a_column_per_value(engine: CapturedEngine) -> None:
    rows = {"hooks": {"post_block": "all"}, "positions": "all_prompt"}
    outputs = captured(engine, {"arrow": rows | {"tag": "t", "readouts": "all"}})
    paths = {p for one in outputs for p in one.capture_results["arrow"].payload}
    for output in outputs:
        (table,) = [
            found
            for path in paths
            if len(found := own_rows(pq.read_table(path), output.request_id))
        ]
        columns = {"lens.token_ids", "lens.logprobs", "probe.values", "norm.norm"}
        columns |= {"norm.cosine", "sae.features", "sae.activations", "mean.rows"}
        assert columns <= set(table.schema.names)
        prompt_rows = len(output.prompt_token_ids or ())
        assert len(rows_of(table)) == LAYERS * prompt_rows
        found = output.readouts
        assert len(table) == LAYERS * len(found["lens"].positions)
        for row in table.to_pylist():
            at, layer = row["position"], row["layer"]
            fed = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids]
            assert row["token_id"] == fed[at]
            assert (
                row["lens.token_ids"] == found["lens"]["token_ids"][at][layer].tolist()
            )
            probe = found["probe"]["values"][at].tolist() if layer == 1 else None
            assert row["probe.values"] == probe
            has_norm = layer != 1 and at >= prompt_rows
            assert (row["norm.norm"] is not None) == has_norm
            last = at == found["mean"].positions[-1]
            assert (row["mean.rows"] is not None) == (last and layer == 1)
            assert (row["values"] is None) == (at >= prompt_rows)


def own_rows(table: Any, request_id: str) -> Any:
    return table.filter([one == request_id for one in table["request_id"].to_pylist()])


def test_results_end_where_the_request_ends_for_its_client(
    engine: CapturedEngine,
) -> None:
    capture = {"inline": {"readouts": ["norm", "lens"]}}
    fired = {"stop_when": [{"readout": "norm", "above": 0.0}]}
    for more in (fired, {"n": 2, "temperature": 1.0}, {"max_tokens": 1}):
        for output in captured(engine, capture, **more):
            payload = output.capture_results["inline"].payload
            for sample in output.outputs:
                own = payload[sample.index] if len(output.outputs) > 1 else payload
                assert sample.readouts is not None
                kept = {name: sample.readouts[name] for name in ("norm", "lens")}
                if "max_tokens" in more:  # No generated token is read out.
                    assert own.pop((2, "post_block.norm.none")).numel() == 0
                    del kept["norm"]
                check_payload(own, kept)


@pytest.mark.parametrize(
    ("capture", "why"),
    [
        ({"inline": {"readouts": ["other"]}}, "no readout 'other'"),
        ({"inline": {"readouts": []}}, "list of names"),
        ({"inline": {"readouts": ["a b"]}}, "file names"),
        ({"inline": {"readouts": ["lens"], "positions": "all"}}, "those of rows"),
        ({"keeper": {"hooks": {"post_block": [0]}, "readouts": "all"}}, "no readouts"),
        ({"single": {"readouts": ["lens"]}}, "format=safetensors"),
        ({"inline": {}}, "hooks"),
    ],
)
def test_what_a_consumer_cannot_take_is_refused(
    engine: CapturedEngine, capture: dict[str, Any], why: str
) -> None:
    specs = {"lens": LENS, "a b": LENS}
    with pytest.raises(ValueError, match=why):
        read_out(engine, [prompt(5, 1)], specs, capture=capture)
