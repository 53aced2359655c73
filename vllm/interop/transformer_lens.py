# SPDX-License-Identifier: Apache-2.0
"""A driver that runs TransformerLens 4 on an `LLM`.

`boot(llm)` returns a `RemoteBridge`: `run_with_cache`, `run_with_hooks` with
`intervene=`, `forward` and `generate` work on any model that is served here. The
protocol is that of TransformerLens 4.3, `model_bridge/driver_protocol.py`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.inputs import TokensPrompt
from vllm.interop.prompt_rows import Tap, capture_spec, rows_of
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import RequestOutput

NAMES = {
    "pre_attn": ("hook_in", "hook_resid_pre"),
    "post_attn": ("ln2.hook_in", "hook_resid_mid"),
    "post_block": ("hook_out", "hook_resid_post"),
    "mlp_in": ("mlp.hook_in",),
    "mlp_out": ("mlp.hook_out", "hook_mlp_out"),
}
"""Our hook points under TransformerLens' names: the bridge's, then the older ones."""

ENGINE: dict[str, Any] = {
    "capture_consumers": ["inline"],
    "enable_steering": True,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}
"""Required arguments of `LLM`; `boot` passes them for a model's name."""


class EngineDriver:
    """TransformerLens' `Driver` on an `LLM`.

    Args:
        llm: an engine started with `ENGINE`.
        bridge_config: TransformerLens' configuration of the model.
        architecture: the Hugging Face name of the model's class.

    Raises:
        ValueError: the engine lacks a feature that the driver needs; the message has
            the remedy.

    """

    provides_sequence_logits = True

    def __init__(self, llm: "LLM", bridge_config: Any, architecture: str) -> None:
        config = llm.llm_engine.vllm_config
        consumers = [entry.instance_name for entry in config.capture_config.consumers]
        if "inline" not in consumers or not config.steering_config.enabled:
            raise ValueError(
                "the engine can neither return rows nor intervene: start it with "
                "LLM(model, **vllm.interop.transformer_lens.ENGINE)"
            )
        mode = config.model_config.logprobs_mode
        if mode != "raw_logits" or config.model_config.max_logprobs != -1:
            raise ValueError(
                f"the engine returns {mode} of at most "
                f"{config.model_config.max_logprobs} tokens: start it with "
                'LLM(model, logprobs_mode="raw_logits", max_logprobs=-1)'
            )
        self.llm = llm
        self.bridge_config = bridge_config
        self.architecture = architecture
        self.tokenizer = llm.get_tokenizer()
        self._vocabulary = config.model_config.get_vocab_size()
        self._taps = _names_of(llm, bridge_config.n_layers)
        self.supported_hook_points = frozenset(self._taps)
        self.non_fireable_hook_points: frozenset[str] = frozenset()

    def forward(
        self,
        input_ids: Any = None,
        *,
        capture: tuple[str, ...] = (),
        intervene: Mapping[str, Any] | None = None,
        max_new_tokens: int = 1,
        return_logits: bool = True,
        **unknown: Any,
    ) -> Any:
        """Run one pass over each prompt, and generate `max_new_tokens`.

        Args:
            input_ids: `[prompts, tokens]` or `[tokens]`, integers.
            capture: hook points in TransformerLens' names.
            intervene: hook point -> `{"op": "suppress" | "scale" | "add" | "set",
                "factor" | "value", "pos"}`.
            max_new_tokens: number of tokens to generate, greedily.
            return_logits: whether to return logits of every prompt position, `[prompts,
                tokens, vocabulary]`, float32; costly, because the engine returns each
                position's separately.
            unknown: other arguments, refused unless they are off. Attention patterns
                have no hook point here.

        Raises:
            ValueError: an argument is unsupported; the message names it.

        """
        from transformer_lens.model_bridge.driver_protocol import ForwardResult

        unknown.pop("output_attentions", None)  # the bridge's cache always passes it
        _refuse(unknown)
        if input_ids is None:
            raise ValueError("input_ids is missing: give token ids [prompts, tokens]")
        ids = np.atleast_2d(np.asarray(input_ids))
        taps = {name: self._tap(name) for name in capture}
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1 if return_logits else None,
            prompt_logprobs=-1 if return_logits else None,
            capture=capture_spec(list(taps.values())) if taps else None,
            steering_vectors=self._interventions(intervene or {}),
        )
        prompts = [TokensPrompt(prompt_token_ids=row.tolist()) for row in ids]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        rows = [rows_of(output) for output in outputs] if taps else []
        return ForwardResult(
            logits=self._logits(outputs) if return_logits else None,
            captured={
                name: torch.stack([of_prompt[tap] for of_prompt in rows])
                for name, tap in taps.items()
            },
            new_tokens=torch.tensor([o.outputs[0].token_ids for o in outputs]),
            raw_output=outputs,
        )

    def close(self) -> None:
        """Do nothing, because the engine belongs to the caller."""

    def supports(self, feature: str) -> bool:
        """Return false: no optional feature is supported."""
        return False

    def _tap(self, name: str) -> Tap:
        if name not in self._taps:
            raise ValueError(
                f"{name!r} is not a hook point that is served here; there are for "
                f"example {sorted(self._taps)[:3]}"
            )
        return self._taps[name]

    def _interventions(self, specs: Mapping[str, Any]) -> dict[str, Any] | None:
        vectors: dict[str, dict[int, list[dict[str, Any]]]] = {}
        for name, spec in specs.items():
            layer, hook = self._tap(name)
            entry = _entry(name, spec, self.bridge_config.d_model)
            vectors.setdefault(hook, {}).setdefault(layer, []).append(entry)
        return vectors or None

    def _logits(self, outputs: Sequence["RequestOutput"]) -> torch.Tensor:
        return torch.stack([_sequence(o, self._vocabulary) for o in outputs])


def boot(model: "LLM | str", **engine: Any) -> Any:
    """Create a TransformerLens `RemoteBridge` on an engine.

    Args:
        model: an `LLM` started with `ENGINE`, or the name or path of a model to start.
        engine: further arguments of `LLM`, if `model` is a name.

    Raises:
        ValueError: the given engine lacks a feature that the driver needs.

    """
    from transformer_lens.factories.architecture_adapter_factory import (
        ArchitectureAdapterFactory,
    )
    from transformer_lens.model_bridge.remote_bridge import RemoteBridge
    from transformer_lens.model_bridge.sources._bridge_builder import (
        build_bridge_config_from_hf,
        configure_tokenizer,
    )

    from vllm.entrypoints.llm import LLM

    llm = LLM(model, **ENGINE | engine) if isinstance(model, str) else model
    config = llm.llm_engine.vllm_config.model_config
    architecture: str = (config.hf_config.architectures or [""])[0]
    bridge_config = build_bridge_config_from_hf(
        config.hf_config, architecture, config.model, config.dtype
    )
    driver = EngineDriver(llm, bridge_config, architecture)
    driver.tokenizer = configure_tokenizer(driver.tokenizer, bridge_config)
    adapter = ArchitectureAdapterFactory.select_architecture_adapter(bridge_config)
    return RemoteBridge(adapter, driver.tokenizer, driver)


def _refuse(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that are neither off nor a mask that hides nothing."""
    for name, value in arguments.items():
        whole = name == "attention_mask" and np.all(np.asarray(value) == 1)
        if value is not None and value is not False and not whole:
            raise ValueError(
                f"{name}: unknown to this driver, which takes input_ids, capture, "
                "intervene, max_new_tokens and return_logits"
            )


def _names_of(llm: "LLM", layers: int) -> dict[str, Tap]:
    """Every name of a hook point of this model."""
    points = ["pre_attn", "post_attn", "post_block"]
    if llm.llm_engine.vllm_config.capture_config.mlp_points:
        points += ["mlp_in", "mlp_out"]
    return {
        f"blocks.{layer}.{name}": (layer, hook)
        for hook in points
        for name in NAMES[hook]
        for layer in range(layers)
    }


def _entry(name: str, spec: Any, width: int) -> dict[str, Any]:
    """The steering entry of one of TransformerLens' declarative interventions."""
    if not isinstance(spec, Mapping):
        raise NotImplementedError(
            f"intervene[{name!r}]: an engine takes a declarative spec such as "
            "{'op': 'scale', 'factor': 0.5}, not a function"
        )
    known = {"op", "factor", "value", "pos"}
    if extra := sorted(spec.keys() - known):
        raise ValueError(
            f"intervene[{name!r}] has no key {extra[0]!r}; its keys are {sorted(known)}"
        )
    entry = _operation(name, spec, width)
    if (positions := spec.get("pos")) is not None:
        entry["positions"] = [positions] if isinstance(positions, int) else positions
    return entry


def _operation(name: str, spec: Mapping[str, Any], width: int) -> dict[str, Any]:
    zeros = np.zeros(width, np.float32)
    match spec.get("op"):
        case "suppress":
            return {"op": "replace", "vector": zeros}
        case "scale":
            # (1 - alpha) x + alpha 0
            return {"op": "replace", "vector": zeros, "alpha": 1.0 - spec["factor"]}
        case "add" | "set" as op:
            value = np.asarray(spec["value"], dtype=np.float32)
            if value.size not in (1, width):
                raise ValueError(
                    f"intervene[{name!r}].value has {value.size} elements; the hook "
                    f"point is {width} wide"
                )
            vector = np.broadcast_to(value.reshape(-1), (width,)).copy()
            return {"op": "add" if op == "add" else "replace", "vector": vector}
        case other:
            raise ValueError(
                f"intervene[{name!r}].op={other!r}: use 'suppress', 'scale', 'add' or "
                "'set'"
            )


def _sequence(output: "RequestOutput", vocabulary: int) -> torch.Tensor:
    """Logits of every prompt position, `[tokens, vocabulary]`, float32.

    The engine lists the logits that predict prompt tokens 1 to P-1, then those that
    predict the first generated token.
    """
    generated = output.outputs[0].logprobs
    assert generated, "logprobs were requested"
    predicted = [*(output.prompt_logprobs or [])[1:], generated[0]]
    logits = torch.full((len(predicted), vocabulary), -torch.inf)
    for row, tokens in zip(logits, predicted):
        assert tokens is not None, "only the first prompt token has none"
        ids = torch.tensor(list(tokens))
        row[ids] = torch.tensor([entry.logprob for entry in tokens.values()])
    return logits
