# SPDX-License-Identifier: Apache-2.0
"""interp-engine's `EngineAPI` on an `AsyncLLM`."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from vllm.inputs import TokensPrompt
from vllm.interop.head import received
from vllm.interop.interp_engine.facts import ModelFacts
from vllm.interop.interp_engine.lens import read_lenses
from vllm.interop.interp_engine.steering import Tiers, readable_tap, steering_of
from vllm.interop.interp_engine.types import (
    GenStep,
    LensStep,
    address_of,
    tap_of,
)
from vllm.interop.interp_engine.wire import decode_tensor
from vllm.interop.prompt_rows import capture_spec, rows_of
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.readouts.frontend.http import packed
from vllm.v1.residual.bounds import shown

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

ENGINE: dict[str, Any] = {"interp_engine_api": True}
"""Required engine arguments, in the form of `AsyncEngineArgs`."""

DIRECTIONS_AT_ONCE = 4096
"""Most vectors of one readout."""


class ServedModel(ModelFacts):
    """A model served by an engine, with the methods of interp-engine's models.

    Args:
        engine: an engine started with `interp_engine_api=True`, or with the consumer
            `inline`, `enable_steering` and `enable_readouts`.

    Raises:
        ValueError: the engine lacks a feature that the methods need.

    """

    def __init__(self, engine: "AsyncLLM") -> None:
        config = engine.vllm_config
        consumers = [entry.instance_name for entry in config.capture_config.consumers]
        ready = config.steering_config.enabled and config.readout_config.enabled
        if "inline" not in consumers or not ready:
            raise ValueError(
                "the engine cannot return rows, steer and read out: start it with "
                "--interp-engine-api (interp_engine_api=True)"
            )
        super().__init__(config, engine.get_tokenizer())
        self.engine = engine
        self.jacobians: dict[str, list[int]] = {}
        """Layers of each set that `set_lens_jacobians` has installed, by name."""

    @classmethod
    def load(cls, model: str, **options: Any) -> "ServedModel":
        """Start an engine; options are arguments of `AsyncEngineArgs`."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(model=model, **ENGINE | options)
        return cls(AsyncLLM.from_engine_args(args))

    async def capture(
        self,
        prompt_token_ids: Sequence[int],
        points: Sequence[Any],
        *,
        steering_spec: Any = None,
        detach: bool = True,
        rows: Sequence[int] | None = None,
    ) -> dict[Any, torch.Tensor]:
        """Rows of a prompt `[tokens, width]` by address, in the model's dtype.

        Steered rows are those after the steering. `rows` selects prompt positions.

        Raises:
            ValueError: an argument is unsupported; the message names it.

        """
        _check_detach(detach)
        tiers = await self._steered(steering_spec, prompt_token_ids)
        taps = {address_of(p, tap_of(p)): self._tap(p, tiers) for p in points}
        positions: Any = "all_prompt"
        wanted = None
        if rows is not None:
            if not rows:
                raise ValueError("rows is empty: leave it out to capture every row")
            wanted = [self._position(row, len(prompt_token_ids)) for row in rows]
            positions = sorted(set(wanted))
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            capture=capture_spec(sorted(set(taps.values())), positions),
            **tiers,  # type: ignore[arg-type]
        )
        found = rows_of(await self._last(prompt_token_ids, params))
        if wanted is not None:
            order = [positions.index(position) for position in wanted]
            found = {tap: values[order] for tap, values in found.items()}
        return {address: found[tap] for address, tap in taps.items()}

    async def project(
        self,
        prompt_token_ids: Sequence[int],
        directions: Sequence[Any],
        *,
        steering_spec: Any = None,
    ) -> list[torch.Tensor]:
        """Products of a prompt's rows with directions, `[tokens, k]` float32 per set.

        They are computed on the workers.

        Raises:
            ValueError: an argument is unsupported; the message names it.

        """
        tiers = await self._steered(steering_spec, prompt_token_ids)
        readouts: dict[str, Any] = {}
        for number, one in enumerate(directions):
            readouts |= await asyncio.to_thread(self._probes, number, one, tiers)
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            readouts=readouts,
            **tiers,  # type: ignore[arg-type]
        )
        output = await self._last(prompt_token_ids, params)
        results = output.outputs[0].readouts or {}
        values: list[list[torch.Tensor]] = [[] for _ in directions]
        for name in readouts:
            result = results[name]
            if result.error is not None:
                raise RuntimeError(f"directions {name}: {result.error}")
            number = int(name.partition(".")[0])
            values[number].append(torch.from_numpy(result["values"]))
        return [torch.cat(parts, dim=1) for parts in values]

    def _probes(self, number: int, one: Any, tiers: Tiers) -> dict[str, Any]:
        """The readouts of one set of directions, by name `<set>.<first row>`."""
        matrix = decode_tensor(one.vectors)
        if matrix.dim() != 2 or matrix.shape[1] != self.d_model:
            raise ValueError(
                f"directions {number}: vectors must be [k, {self.d_model}], not "
                f"{list(matrix.shape)}"
            )
        if one.nonlinearity not in ("none", "relu"):
            raise ValueError(
                f"directions {number}: nonlinearity={shown(one.nonlinearity)}; use "
                "'none' or 'relu', or register a probe with jumprelu"
            )
        bias = None if one.bias is None else decode_tensor(one.bias)
        if bias is not None and bias.shape != (len(matrix),):
            raise ValueError(
                f"directions {number}: bias must be [{len(matrix)}], not "
                f"{list(bias.shape)}"
            )
        layer, hook = self._tap(one.point, tiers)
        common = {"kind": "probe", "layer": layer, "hook": hook}
        common |= {"positions": "all_prompt", "activation": one.nonlinearity}
        probes = {}
        for first in range(0, len(matrix), DIRECTIONS_AT_ONCE):
            own = slice(first, first + DIRECTIONS_AT_ONCE)
            # Packed: millions of numbers in lists would hold the event loop for long.
            probes[f"{number}.{first}"] = {
                **common,
                "vectors": packed(matrix[own].numpy()),
                "bias": 0.0 if bias is None else bias[own].tolist(),
            }
        return probes

    async def unembed_rows(self, token_ids: Sequence[int]) -> torch.Tensor:
        """The unembedding's rows of tokens, `[tokens, d_model]`, in its own dtype.

        Raises:
            ValueError: the model has no unembedding, or a token is not in the
                vocabulary.

        """
        tokens = [int(one) for one in token_ids]
        size = self.config.model_config.get_vocab_size()
        for token in tokens:
            if not 0 <= token < size:
                raise ValueError(
                    f"token {token} is outside of the vocabulary of {size}"
                )
        return (await self._asked("unembedding_rows", tokens))[0]

    async def decode_residuals(
        self, residuals: torch.Tensor, *, detach: bool = True
    ) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of rows `[rows, d_model]`, float32.

        They are computed by the model's own final norm and head.

        Raises:
            ValueError: the shape is wrong, or the model has no such head.

        """
        _check_detach(detach)
        return (await self.decoded(residuals))[0]

    async def decoded(
        self, residuals: torch.Tensor, top_k: int | None = None
    ) -> list[torch.Tensor]:
        """The same logits; or the ids and values of the largest, `[rows, top_k]` each.

        The largest are chosen in the engine, which sends only these.
        """
        rows = decode_tensor(residuals)
        if rows.dim() != 2 or rows.shape[1] != self.d_model or not len(rows):
            raise ValueError(
                f"residuals must be [1 or more rows, {self.d_model}], not "
                f"{list(rows.shape)}"
            )
        sent = rows.contiguous().numpy().tobytes()
        return await self._asked("decoded_rows", sent, len(rows), top_k)

    async def set_lens_jacobians(
        self, jacobians: Mapping[int, torch.Tensor] | None, *, name: str = "default"
    ) -> int:
        """Install a map `[d_model, d_model]` per layer; None removes the set.

        Returns:
            Number of bytes that each rank holds.

        """
        module = jacobian_module(name)
        if jacobians is None:
            if self.jacobians.pop(name, None) is not None:
                await self.engine.unregister_readout_module(module)
            return 0
        from vllm.v1.readouts.modules import save_translator

        maps = {int(layer): one.float().cpu() for layer, one in jacobians.items()}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jacobians.safetensors"
            await asyncio.to_thread(save_translator, path, maps)
            await self.engine.register_readout_module(module, str(path), replace=True)
        self.jacobians[name] = sorted(maps)
        return sum(one.nbytes for one in maps.values())

    async def generate_with_lens(
        self,
        prompt_token_ids: Sequence[int],
        lenses: Sequence[Any],
        *,
        point: str = "resid_post",
        top_n: int = 10,
        max_tokens: int = 0,
        temperature: float = 0.0,
        seed: int | None = None,
        word_mask: torch.Tensor | None = None,
        skip_before: int = 0,
        stream_reduce: str = "none",
        stream_index: int | None = None,
        jacobians: Mapping[int, torch.Tensor] | None = None,
        softcap: float | None = None,
        steering_spec: Any = None,
    ) -> AsyncIterator[LensStep]:
        """Read lenses at every position of a prompt and of the generated text.

        The model's own softcap is used, whatever `softcap` is.

        Raises:
            ValueError: an argument is unsupported; the message names it.

        """
        del softcap
        if word_mask is not None:
            raise ValueError(
                "word_mask: all tokens are ranked here; use a larger top_n and "
                "filter the result"
            )
        if stream_reduce != "none" or stream_index is not None:
            raise ValueError("stream_reduce, stream_index: models here have one stream")
        if jacobians is not None:
            raise ValueError(
                "jacobians: install them once with set_lens_jacobians, and name the "
                "set in LensSpec.jacobian_set"
            )
        tiers = await self._steered(steering_spec, prompt_token_ids)
        params = SamplingParams(
            # Rows exist for tokens that are fed back, so one more token is generated.
            max_tokens=max_tokens + 1,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **tiers,  # type: ignore[arg-type]
        )
        reading = (lenses, point, top_n, skip_before, tiers)
        async for step in read_lenses(self, list(prompt_token_ids), *reading, params):
            yield step

    async def generate_steps(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int = 64,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        presence_penalty: float | None = None,
        stop_at_eos: bool = True,
        n_logprobs: int = 0,
        seed: int | None = None,
        steering_spec: Any = None,
        steer_generated: bool = True,
    ) -> AsyncIterator[GenStep]:
        """Yield one step per generated token, the stop token included.

        With `steer_generated=False` only the prompt is steered.
        """
        settings = self.sampling_settings(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            presence_penalty=presence_penalty,
        )
        tiers = await self._steered(steering_spec, prompt_token_ids, steer_generated)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=settings.temperature,
            top_k=-1 if settings.top_k is None else settings.top_k,
            top_p=1.0 if settings.top_p is None else settings.top_p,
            presence_penalty=settings.presence_penalty,
            seed=seed,
            ignore_eos=not stop_at_eos,
            logprobs=n_logprobs or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **tiers,  # type: ignore[arg-type]
        )
        async for output in self._outputs(prompt_token_ids, params):
            part = output.outputs[0]
            listed: Any = part.logprobs or [None] * len(part.token_ids)
            for token, choices in zip(part.token_ids, listed):
                text = self.tokenizer.decode([token])
                yield GenStep(token, text, None, _ranked(choices, n_logprobs))

    async def warmup(self) -> None:
        """Do nothing, because a started engine is warm."""

    async def shutdown(self) -> None:
        """Stop the engine."""
        self.engine.shutdown()

    async def _steered(
        self, spec: Any, prompt_token_ids: Sequence[int], generated: bool = True
    ) -> Tiers:
        """What a call is steered with, which is read on a thread."""
        arguments = self, spec, prompt_token_ids, generated
        return await asyncio.to_thread(steering_of, *arguments)

    async def _asked(self, method: str, *arguments: Any) -> list[torch.Tensor]:
        """Request tensors from the engine core."""
        core = self.engine.engine_core
        try:
            answer = await core.call_utility_async(method, *arguments)
        except Exception as error:
            # An exception in the engine core arrives as its text.
            if type(error) is Exception:
                raise ValueError(str(error)) from error
            raise
        return received(answer)

    def _tap(self, point: Any, tiers: Tiers) -> tuple[int, str]:
        if (refusal := self.refuses(point)) is not None:
            raise ValueError(refusal)
        return readable_tap(tap_of(point), tiers, self.n_layers)

    def _position(self, row: int, count: int) -> int:
        if not -count <= row < count:
            raise ValueError(f"rows: {row} is outside of the prompt's {count} tokens")
        return row % count

    def _outputs(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> AsyncIterator["RequestOutput"]:
        ids = [int(one) for one in prompt_token_ids]
        prompt = TokensPrompt(prompt_token_ids=ids)
        return self.engine.generate(prompt, params, f"interp-{uuid4().hex}")

    async def _last(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> "RequestOutput":
        params.output_kind = RequestOutputKind.FINAL_ONLY
        last = None
        async for output in self._outputs(prompt_token_ids, params):
            last = output
        assert last is not None, "an engine gives at least one output"
        return last


def _check_detach(detach: bool) -> None:
    if not detach:
        raise ValueError("detach=False: an engine keeps no gradients; leave it out")


def jacobian_module(name: str) -> str:
    """The name of the readout module of a set of Jacobians."""
    return f"interp-engine-jacobians-{name}"


def _ranked(choices: Any, count: int) -> list[dict[str, float | int]] | None:
    """The `count` likeliest tokens; the sampled one may be listed in addition."""
    if choices is None:
        return None
    ranked = sorted(choices.items(), key=lambda item: -item[1].logprob)[:count]
    return [{"token_id": token, "logprob": one.logprob} for token, one in ranked]
