# SPDX-License-Identifier: Apache-2.0
"""The results in `RequestOutput`."""

from os import PathLike
from typing import TYPE_CHECKING, Any

from vllm.v1.readouts.results import ReadoutResult, merge_results

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

__all__ = ["ReadoutResult", "merge", "readouts_of", "save_html", "steering_of"]


def readouts_of(output: "RequestOutput") -> dict[str, ReadoutResult]:
    """Readout results of the only sample, by name.

    Raises:
        ValueError: there are several samples, each of which has results of its own.

    """
    sample = _only_sample(output, "readouts")
    return {} if sample is None else sample.readouts or {}


def steering_of(output: "RequestOutput") -> dict[str, Any] | None:
    """What steering did to the only sample, if a receipt was requested.

    Raises:
        ValueError: there are several samples, each of which has a receipt of its own.

    """
    sample = _only_sample(output, "steering")
    return None if sample is None else sample.steering


def save_html(
    output: "RequestOutput", path: str | PathLike[str], tokenizer: Any
) -> None:
    """Write one HTML file of the text and its readouts, as a client does.

    Args:
        output: the result of a request with one sample.
        path: the file, which refers to no other.
        tokenizer: `llm.get_tokenizer()`, for the texts of tokens.

    Raises:
        ImportError: `clearbox-client`, which draws it, is not installed.
        ValueError: the prompt was given as embeddings, or there are several samples.

    """
    from clearbox_client import html

    def texts(ids: list[int]) -> list[str]:
        return [tokenizer.decode([one]) for one in ids]

    if output.prompt_token_ids is None:
        raise ValueError("save_html: a prompt of embeddings has no texts to show")
    readouts = {name: one.for_client() for name, one in readouts_of(output).items()}
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    html.save(path, texts(ids), readouts, texts)


def _only_sample(output: "RequestOutput", name: str) -> "CompletionOutput | None":
    if len(output.outputs) > 1 and any(getattr(one, name) for one in output.outputs):
        raise ValueError(
            f"{name}: the request has {len(output.outputs)} samples, and each has its "
            f"own; read output.outputs[i].{name}"
        )
    return output.outputs[0] if output.outputs else None


def merge(output: "RequestOutput", later: "RequestOutput", aggregate: bool) -> None:
    """Merge the results of a later output into `output`, before upstream's fields.

    Args:
        output: the earlier output of the same request.
        later: the later one.
        aggregate: whether a sample's outputs are joined; else the later replaces it.

    """
    output.capture_id = later.capture_id or output.capture_id
    own = {sample.index: sample for sample in output.outputs} if aggregate else {}
    for new in later.outputs:
        if (sample := own.get(new.index)) is not None:
            sample.readouts = merge_results(
                sample.readouts, new.readouts, new.finished()
            )
            sample.steering = new.steering or sample.steering
