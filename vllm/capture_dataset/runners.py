# SPDX-License-Identifier: Apache-2.0
"""Runners of prompts: an engine in this process, servers, or a cluster."""

import ctypes
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from vllm.capture_dataset.manifest import ShardFile
from vllm.capture_dataset.prompts import Prompt, Tokens
from vllm.capture_dataset.sources import digest
from vllm.capture_dataset.spec import ModelFacts, RowsSpec
from vllm.capture_dataset.table import Captured
from vllm.v1.capture.results import RowsByTap
from vllm.v1.readouts.results import ReadoutResult
from vllm.v1.residual.tap import Tap

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.capture_dataset.plan import Plan
    from vllm.engine.arg_utils import EngineArgs


UNBOUNDED = 1 << 62
CONSUMER = {
    "name": "inline",
    # Only the prompts of one shard are in flight; their number is already bounded.
    "params": {"max_request_bytes": UNBOUNDED},
}
COLLECTED_AT_ONCE = 64
"""Number of finished requests whose rows are collected together."""
COLLECT_SECONDS = 1.0
"""After so long fewer are collected, so that progress is seen within a shard."""
IN_FLIGHT = 1024
"""Maximum number of requests in the engine, which is enough for large batches.

The front end drops results that were not fetched when it tracks several thousand.
"""


class CaptureRunError(RuntimeError):
    """A prompt could not be captured; earlier results are kept."""


class Runner(Protocol):
    """Runs prompts and yields their rows, in any order."""

    model: ModelFacts
    tokenizer: Any

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        """Run the prompts of a shard."""

    def readout_modules(self) -> dict[str, Any]:
        """The named probes, translators and SAEs, with facts that identify them."""

    def close(self) -> None:
        """Release the runner's resources."""


@runtime_checkable
class Writer(Runner, Protocol):
    """A runner whose engines write their shards themselves."""

    def written(
        self, plan: "Plan", facts: dict[str, Any], first_sample: int, number: int
    ) -> Generator[ShardFile]:
        """Compute and write the shards from a sample on; returns them in order.

        Args:
            plan: the plan of the data set.
            facts: those of its manifest.
            first_sample: the first sample to compute.
            number: of the shard that begins with it.

        Raises:
            CaptureRunError: a prompt or an engine failed.

        """


def open_engine(engine_args: "EngineArgs") -> "EngineRunner":
    """Start an engine in this process."""
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        keep_freed_memory()
    engine_args.capture_consumers = [CONSUMER]
    return EngineRunner(LLM.from_engine_args(engine_args))


class EngineRunner:
    """A runner on an `LLM` in this process.

    Its steps depend on a shard's prompts only: each shard starts with an empty prefix
    cache, and the engine core runs on this thread. So the rows of a resumed run are bit
    for bit those of an uninterrupted one.
    """

    def __init__(self, llm: "LLM") -> None:
        """Wrap an engine that has `CONSUMER`."""
        self._llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.model = _facts_of(llm)
        self._count = 0

    def run(
        self, prompts: Sequence[Prompt], rows: RowsSpec, tokens: Tokens
    ) -> Iterator[Captured]:
        """Run the prompts of a shard."""
        engine = self._llm.llm_engine
        self._llm.reset_prefix_cache()
        waiting = iter(prompts)
        sent: dict[str, Prompt] = {}
        ended: list[RequestOutput] = []
        collected_at = monotonic()
        taps = rows.taps
        while self._add(islice(waiting, IN_FLIGHT - len(sent)), rows, sent):
            outputs: Any = engine.step()
            # Requests of earlier steps: their rows arrived while this step was
            # computed.
            late = monotonic() - collected_at > COLLECT_SECONDS
            if len(ended) >= COLLECTED_AT_ONCE or late:
                yield from self._collect(ended, sent, taps, tokens)
                ended, collected_at = [], monotonic()
            ended += [output for output in outputs if output.finished]
            if len(ended) == len(sent):
                yield from self._collect(ended, sent, taps, tokens)
                ended = []

    def _add(
        self, prompts: Iterable[Prompt], rows: RowsSpec, sent: dict[str, Prompt]
    ) -> bool:
        """Submit prompts; returns whether any prompt was not collected yet."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        capture = {"inline": rows.capture()}
        for prompt in prompts:
            self._count += 1
            request_id = str(self._count)
            params = SamplingParams(
                max_tokens=rows.max_tokens,
                temperature=0.0,
                detokenize=False,
                # Otherwise the rows of each step would be streamed as well.
                output_kind=RequestOutputKind.FINAL_ONLY,
                # Nobody else uses these parameters, so they need not be copied.
                skip_clone=True,
                capture=capture,
                readouts=dict(rows.readouts) or None,
            )
            ids = tokens_input(prompt.token_ids)
            self._llm.llm_engine.add_request(request_id, ids, params)
            sent[request_id] = prompt
        return bool(sent)

    def _collect(
        self,
        ended: "list[RequestOutput]",
        sent: dict[str, Prompt],
        taps: list[Tap],
        tokens: Tokens,
    ) -> Iterator[Captured]:
        self._llm.llm_engine.capture.wait(ended)
        for output in ended:
            prompt = sent.pop(output.request_id)
            result = (output.capture_results or {})["inline"]
            if result.status != "ok":
                raise failed(prompt, result.error)
            generated = list(output.outputs[0].token_ids)
            payload = result.payload or nothing_kept(taps, self.model)
            yield captured(prompt, payload, generated, tokens, output.readouts)

    def readout_modules(self) -> dict[str, Any]:
        """The modules, each with a digest of its files."""
        known = self._llm.llm_engine.residual.modules
        modules = {} if known is None else known.all
        return {
            name: one.describe() | {"sha256": digest(Path(one.path), pattern="*")}
            for name, one in modules.items()
        }

    def close(self) -> None:
        """Stop the engine."""
        self._llm.llm_engine.engine_core.shutdown()


def captured(
    prompt: Prompt,
    payload: RowsByTap,
    generated: list[int],
    tokens: Tokens,
    readouts: Mapping[str, ReadoutResult],
) -> Captured:
    """Combine a prompt with its rows and readouts.

    Raises:
        CaptureRunError: a readout failed.

    """
    positions = next(iter(payload.positions.values()))
    for name, result in readouts.items():
        if result.error is not None:
            raise failed(prompt, f"readout {name!r}: {result.error}")
    return Captured(
        prompt,
        dict(payload),
        positions,
        prompt.token_ids + generated,
        tokens.continued(prompt, generated),
        readouts,
    )


def nothing_kept(taps: Iterable[Tap], model: ModelFacts) -> RowsByTap:
    """The rows of a request in which `keep_when` did not fire."""
    rows = RowsByTap()
    dtype = getattr(torch, model.dtype)
    for tap in taps:
        none = torch.empty(0, model.hidden_size, dtype=dtype)
        rows.put(tap, none, {"positions": [], "token_ids": []})
    return rows


def failed(
    prompt: Prompt, reason: str | None, kind: type[CaptureRunError] = CaptureRunError
) -> CaptureRunError:
    """The error for a prompt without rows."""
    entry = prompt.entry
    return kind(
        f"{entry.where} (id {entry.prompt_id!r}) could not be captured: {reason}"
    )


def _facts_of(llm: "LLM") -> ModelFacts:
    """The facts of an engine's model; the tokenizer's digest is filled in later."""
    from vllm.v1.residual.model_identity import identity_of
    from vllm.v1.residual.sizes import num_layers

    config = llm.llm_engine.vllm_config
    identity = identity_of(config)
    model = config.model_config
    status = llm.llm_engine.capture.describe()
    return ModelFacts(
        name=identity.name,
        architecture=identity.architecture,
        weights=identity.weights,
        tokenizer="",
        num_layers=num_layers(model),
        hidden_size=model.get_hidden_size(),
        max_model_len=model.max_model_len,
        dtype=str(model.dtype).removeprefix("torch."),
        other_widths=status["other_widths"],
        last_token=max(llm.get_tokenizer().max_token_id, model.get_vocab_size() - 1),
        hook_points={
            int(layer): tuple(points) for layer, points in status["hook_points"].items()
        },
    )


M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Parameter numbers from glibc's `malloc.h`."""
KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory of any size for later tensors.

    Returns:
        Whether this is supported: only glibc has the setting.

    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
