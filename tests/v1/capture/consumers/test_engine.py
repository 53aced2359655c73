# SPDX-License-Identifier: Apache-2.0
"""The consumers with a real engine, shared by the tests of this file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
import torch

from tests.support.models import llama
from vllm import LLM, SamplingParams
from vllm.v1.capture.consumers.arrow import rows_of
from vllm.v1.capture.consumers.filesystem import read_request
from vllm.v1.capture.consumers.filesystem.types import LAYOUTS

pytestmark = pytest.mark.e2e

PROMPTS = [{"prompt_token_ids": [7 + i, 3, 50, 9, 11 * i][: 3 + i]} for i in range(3)]
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[Any]:
    opened = LLM(
        str(llama(root / "model")),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        capture_consumers=[
            f"filesystem:root={root / 'files'}",
            {
                "name": "filesystem",
                "instance_name": "every",
                "params": {
                    "root": str(root / "every"),
                    "global_hooks": {"post_block": [1]},
                    "global_positions": "last_prompt",
                },
            },
            f"arrow:root={root / 'tables'}",
            "inline:max_request_bytes=40000,max_inflight_bytes=60000",
        ],
    )
    yield opened
    opened.llm_engine.engine_core.shutdown()


def spec(**more: Any) -> dict[str, Any]:
    return {"hooks": {"pre_attn": "all", "post_block": [2]}, "positions": "all", **more}


def generate(llm: Any, captures: list[dict[str, Any]], **params: Any) -> list[Any]:
    return llm.generate(
        PROMPTS[: len(captures)],
        [
            SamplingParams(
                max_tokens=MAX_TOKENS,
                temperature=1.0 if params else 0.0,
                ignore_eos=True,
                detokenize=False,
                capture=capture,
                **params,
            )
            for capture in captures
        ],
        use_tqdm=False,
    )


def test_inline_and_every_layout_and_the_tables_agree(llm: Any, root: Path) -> None:
    names = [f"{layout}-request" for layout in LAYOUTS]
    outputs = generate(
        llm,
        [
            {
                "inline": spec(),
                "filesystem": spec(request_id=name, layout=layout),
                "arrow": spec(request_id=name),
            }
            for name, layout in zip(names, LAYOUTS)
        ],
    )
    for name, output in zip(names, outputs):
        results = output.capture_results
        assert {r.status for r in results.values()} == {"ok"}, results
        rows = results["inline"].payload
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        assert rows.keys() == {(la, "pre_attn") for la in range(3)} | {
            (2, "post_block")
        }
        stored = read_request(root / "files", "default", name)
        table = ds.dataset(results["arrow"].payload).to_table(
            filter=ds.field("request_id") == name
        )
        assert table.num_rows == 4 * len(tokens)
        for tap, tensor in rows.items():
            assert tensor.dtype is torch.bfloat16
            assert tensor.shape == (len(tokens), 64)
            assert rows.token_ids[tap] == tokens
            assert torch.equal(stored[tap], tensor)
        for row, values in zip(table.to_pylist(), rows_of(table), strict=True):
            tensor = rows[row["layer"], row["hook"]][row["position"]]
            assert torch.equal(values, tensor)
            assert row["token_id"] == tokens[row["position"]]


def test_requests_that_share_an_id_and_asked_for_nothing_have_files_each(
    llm: Any, root: Path
) -> None:
    from vllm import SamplingParams

    engine = llm.llm_engine
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        engine.add_request("shared", prompt, params)
    finished: list[Any] = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.finished]
    engine.output_processor.residual.capture.wait(finished)
    found = {
        path.parent.name: json.loads(path.read_text())["token_ids"]
        for path in (root / "every" / "default").glob("shared*/*.json")
    }
    assert found == {
        name: prompt["prompt_token_ids"][-1:]
        for name, prompt in zip(("shared", "shared-2", "shared-3"), PROMPTS)
    }
    paths = [output.capture_results["every"].payload for output in finished]
    assert len({path for (path,) in paths}) == len(PROMPTS)


def test_a_request_over_its_limit_is_refused_with_its_size(llm: Any) -> None:
    with pytest.raises(ValueError, match="may take 49152 bytes"):
        generate(llm, [{"inline": spec(hooks={"pre_attn": "all"})}], n=16)


def test_rows_of_a_list_are_the_callers_and_have_no_common_limit(llm: Any) -> None:
    # 8 rows at 3 taps of 128 bytes, 10 samples: 30720 bytes; a server allows 60000.
    captures = [{"inline": spec(hooks={"pre_attn": "all"})}] * 3
    outputs = generate(llm, captures, n=10)
    assert [output.prompt_token_ids for output in outputs] == [
        prompt["prompt_token_ids"] for prompt in PROMPTS[:3]
    ]
    for output in outputs:
        result = output.capture_results["inline"]
        assert result.status == "ok" and len(result.payload) == 10
