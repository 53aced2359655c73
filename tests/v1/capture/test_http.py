# SPDX-License-Identifier: Apache-2.0
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from vllm.v1.capture.errors import CaptureValidationError
from vllm.v1.capture.http import refuse_unsupported, response_results, stamp
from vllm.v1.capture.types import CaptureResult


class Carries(BaseModel):
    capture: Any = None
    capture_wait: bool = False


class Embeds(BaseModel):
    prompt: str = ""


def result(status: Any = "ok", payload: Any = None) -> CaptureResult:
    return CaptureResult(("r", -1, "*"), status, None, payload)  # type: ignore[arg-type]


def output(**results: CaptureResult) -> Any:
    return SimpleNamespace(finished=True, capture_results=results or None)


SPEC = {"filesystem": {"request_id": "x", "hooks": {"post_block": [0]}}}


@pytest.mark.parametrize("field", ["capture", "capture_wait"])
def test_a_request_without_our_fields_refuses_them(field: str) -> None:
    with pytest.raises(CaptureValidationError, match="Embeds has no such field") as e:
        refuse_unsupported(Embeds, {field: SPEC})
    assert e.value.parameter == field


def test_a_request_with_our_fields_takes_them() -> None:
    refuse_unsupported(Carries, {"capture": SPEC, "capture_wait": True})
    refuse_unsupported(Embeds, {"prompt": "x"})
    refuse_unsupported(Embeds, "no object")


def test_beam_search_cannot_be_captured() -> None:
    with pytest.raises(CaptureValidationError, match="beam search"):
        refuse_unsupported(Carries, {"capture": SPEC, "use_beam_search": True})
    refuse_unsupported(Carries, {"use_beam_search": True})


@pytest.mark.parametrize("prompts", [["a", "b"], [[1, 2], [3]]])
def test_several_prompts_cannot_share_a_request_id(prompts: Any) -> None:
    with pytest.raises(CaptureValidationError, match="2 prompts cannot share one"):
        refuse_unsupported(Carries, {"capture": SPEC, "prompt": prompts})


@pytest.mark.parametrize("prompts", ["a", ["a"], [1, 2], [[1, 2]], []])
def test_one_prompt_may_name_its_request(prompts: Any) -> None:
    refuse_unsupported(Carries, {"capture": SPEC, "prompt": prompts})


def test_results_of_one_prompt_are_as_the_consumers_gave_them() -> None:
    paths = [Path("/a/b.bin")]
    reply = response_results([output(files=result(payload=paths))])
    assert reply == {
        "files": {
            "key": ["r", -1, "*"],
            "status": "ok",
            "error": None,
            "payload": ["/a/b.bin"],
        }
    }


def test_results_of_several_prompts_are_by_prompt() -> None:
    outputs = [output(files=result("ok", ["a"])), output(files=result("error"))]
    reply = response_results(outputs)
    assert reply is not None
    assert reply["files"]["status"] == "partial_error"
    assert reply["files"]["payload"] == {"0": ["a"], "1": None}


def test_nothing_captured_is_no_field() -> None:
    assert response_results([output(), None]) is None


def test_only_the_last_chunk_is_stamped() -> None:
    chunk = SimpleNamespace(capture_results=None)
    unfinished = output(files=result())
    unfinished.finished = False
    stamp(chunk, unfinished)
    assert chunk.capture_results is None
    stamp(chunk, output(files=result()))
    assert chunk.capture_results["files"]["status"] == "ok"
