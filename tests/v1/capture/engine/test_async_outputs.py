# SPDX-License-Identifier: Apache-2.0
"""Outputs of `AsyncLLM` have rows as steps compute them; the last one has all."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import asynchronous
from tests.support.captured import prompt
from tests.support.hf_reference import Reference, relative_error
from tests.support.models import llama
from vllm import RequestOutput, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[4] / "examples" / "capture"
CUMULATIVE = RequestOutputKind.CUMULATIVE
DELTA = RequestOutputKind.DELTA
FINAL_ONLY = RequestOutputKind.FINAL_ONLY


class Served:
    """An `AsyncLLM` and its event loop."""

    def __init__(self, model: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.reference = Reference(model)
        self._names = iter(range(1_000_000))
        arguments = AsyncEngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            async_scheduling=True,
            disable_log_stats=True,
            capture_consumers=["inline"],
        )
        self.engine: AsyncLLM = self.loop.run_until_complete(self._open(arguments))

    async def _open(self, arguments: AsyncEngineArgs) -> AsyncLLM:
        return AsyncLLM.from_engine_args(arguments)

    def outputs(
        self, ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator[RequestOutput]:
        given: Any = {"prompt_token_ids": list(ids)}
        return self.engine.generate(given, params, f"r{next(self._names)}")

    def all(self, ids: Sequence[int], params: SamplingParams) -> list[RequestOutput]:
        async def collect() -> list[RequestOutput]:
            return [output async for output in self.outputs(ids, params)]

        return self.loop.run_until_complete(collect())

    def close(self) -> None:
        self.engine.shutdown()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with asynchronous.allowed():
        opened = Served(llama(tmp_path_factory.mktemp("llama")))
    yield opened
    opened.close()


def asking(
    kind: RequestOutputKind, positions: Any = "all", **options: Any
) -> SamplingParams:
    spec = {"hooks": {"post_block": "all"}, "positions": positions}
    chosen: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
    return SamplingParams(
        output_kind=kind, capture={"inline": spec}, **chosen | options
    )


def payload(output: RequestOutput) -> Any:
    results: Any = output.capture_results  # type: ignore[attr-defined]
    return results["inline"].payload


def statuses(outputs: Sequence[RequestOutput]) -> list[str]:
    return [o.capture_results["inline"].status for o in outputs]  # type: ignore[attr-defined]


def test_cumulative_outputs_carry_all_rows_so_far(served: Served) -> None:
    ids = prompt(30, seed=1)
    # Outputs that a busy reader has not taken yet are merged, on a loaded machine all
    # of them: more tokens until some are separate.
    for tokens in (40, 80, 160, 220):
        outputs = served.all(ids, asking(CUMULATIVE, max_tokens=tokens))
        if len(outputs) > 4:
            break
    *before, last = outputs
    assert statuses(outputs) == ["pending"] * len(before) + ["ok"]
    fed = [*ids, *last.outputs[0].token_ids][:-1]
    expected = served.reference.stream(fed)
    for tap, rows in payload(last).items():
        assert relative_error(rows, expected[tap]) < 1e-4
    counts = [len(payload(o).positions.get((0, "post_block"), ())) for o in before]
    assert counts == sorted(counts)
    assert len(set(counts)) > 2, "rows did not come as they were computed"
    for output in before:
        shown = payload(output)
        for tap, rows in shown.items():
            assert torch.equal(rows, payload(last)[tap][: len(rows)])
            assert shown.positions[tap] == list(range(len(rows)))
            assert shown.token_ids[tap] == fed[: len(rows)]
            assert len(rows) <= len(ids) + len(output.outputs[0].token_ids) - 1


def test_deltas_carry_each_row_once(served: Served) -> None:
    params = asking(DELTA, "all_generated", max_tokens=40)
    *before, last = served.all(prompt(20, seed=2), params)
    tap = (2, "post_block")
    parts = [payload(output) for output in before if tap in payload(output)]
    positions = [p for part in parts for p in part.positions[tap]]
    assert positions == list(range(20, 20 + len(positions)))
    assert len(parts) > 2, "rows did not come as they were computed"
    rows = torch.cat([part[tap] for part in parts])
    assert torch.equal(rows, payload(last)[tap][: len(rows)])
    assert payload(last).positions[tap] == list(range(20, 59))


def test_each_sample_has_its_rows(served: Served) -> None:
    # Enough tokens that rows which arrive late are still in an output.
    params = asking(CUMULATIVE, n=2, temperature=1.0, seed=1, max_tokens=48)
    *before, last = served.all(prompt(9, seed=3), params)
    assert payload(last).keys() == {0, 1}
    tap = (1, "post_block")
    for output in before:
        for index, rows in payload(output).items():
            whole = payload(last)[index][tap]
            assert torch.equal(
                rows.get(tap, whole[:0]), whole[: len(rows.get(tap, ()))]
            )
    assert any(len(payload(output)[0].get(tap, ())) > 9 for output in before)


def test_no_row_past_a_stop_string_was_shown(served: Served) -> None:
    ids = prompt(12, seed=7)
    free = served.all(ids, asking(CUMULATIVE))[-1].outputs[0]
    tokenizer = served.engine.get_tokenizer()
    tokens = list(free.token_ids)
    stop = tokenizer.decode(tokens[:6])[len(tokenizer.decode(tokens[:4])) :]
    outputs = served.all(ids, asking(CUMULATIVE, stop=[stop]))
    last = outputs[-1]
    assert last.outputs[0].finish_reason == "stop"
    tap = (0, "post_block")
    whole = payload(last).positions[tap]
    assert whole == list(range(12 + len(last.outputs[0].token_ids) - 1))
    for output in outputs:
        assert (
            payload(output).positions.get(tap, [])
            == whole[: len(payload(output).get(tap, ()))]
        )


def test_rows_come_only_at_the_end_where_that_is_asked_for(served: Served) -> None:
    params = asking(CUMULATIVE, capture_stream=False)
    *before, last = served.all(prompt(5, seed=4), params)
    assert all(o.capture_results is None for o in before)  # type: ignore[attr-defined]
    assert len(payload(last)[0, "post_block"]) == 16


def test_the_example_prints_rows_as_they_come(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from live_rows import show

    served.loop.run_until_complete(show(served.engine, "a short story", [0, 2]))
    printed = capsys.readouterr().out
    assert re.search(r"^position  token +layer 0 +layer 2$", printed, re.M)
    rows = re.findall(r"^ *(\d+)  .+ (\d+\.\d\d) +(\d+\.\d\d)$", printed, re.M)
    positions = [int(position) for position, _, _ in rows]
    assert positions == list(range(len(rows))) and len(rows) > 20


def test_a_session_whose_prompt_comes_in_parts_is_refused(served: Served) -> None:
    # At a position that streaming input could not have; the error must be another one.
    asked = asking(DELTA, [50])

    async def parts() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(prompt={"prompt_token_ids": prompt(5)})  # type: ignore[typeddict-item]

    async def collect() -> None:
        async for _ in served.engine.generate(parts(), asked, "session"):  # type: ignore[arg-type]
            raise AssertionError("the session was let in")

    with pytest.raises(ValueError, match="streaming input.*the whole prompt") as caught:
        served.loop.run_until_complete(collect())
    assert caught.value.parameter == "capture"  # type: ignore[attr-defined]
    assert "inline" in caught.value.value  # type: ignore[attr-defined]
