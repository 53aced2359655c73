# SPDX-License-Identifier: Apache-2.0
"""A model for SAELens' `ActivationsStore` and training runner, served by an `LLM`.

SAELens calls `run_with_cache`, `to_tokens` and `tokenizer` and reads the device:
decoderesearch/SAELens 6.54, `sae_lens/training/activations_store.py`.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vllm.interop.prompt_rows import prompt_rows, taps_of

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None

# Arguments of TransformerLens' methods that leave these results as they are.
WITHOUT_EFFECT = {"padding_side": "right", "clear_contexts": True}


class ServedModel:
    """An `LLM` with an `inline` consumer, in place of a `HookedTransformer`."""

    def __init__(self, llm: "LLM", device: str | torch.device = "cpu") -> None:
        """Wrap `llm` as a model.

        Args:
            llm: an engine started with `capture_consumers=["inline"]`.
            device: device of the returned activations, independent of the engine's.

        Raises:
            ValueError: the engine has no `inline` consumer.

        """
        config = llm.llm_engine.vllm_config
        if "inline" not in [c.instance_name for c in config.capture_config.consumers]:
            raise ValueError(
                "the engine returns no rows: start it with "
                'LLM(..., capture_consumers=["inline"])'
            )
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        text = config.model_config.hf_text_config
        self.cfg = SimpleNamespace(
            device=torch.device(device),
            d_model=config.model_config.get_hidden_size(),
            n_layers=text.num_hidden_layers,
            n_ctx=config.model_config.max_model_len,
            model_name=config.model_config.model,
        )

    @classmethod
    def start(
        cls,
        model: str,
        *,
        stop_at_layer: int | None = None,
        device: str | torch.device = "cpu",
        **engine: Any,
    ) -> "ServedModel":
        """Start an engine for a model and serve it.

        Args:
            model: a name or a path.
            stop_at_layer: how many of the first layers are loaded and run; all by
                default. SAELens reads nothing after `blocks.L.hook_resid_post` with
                `stop_at_layer=L + 1`.
            device: as in `__init__`.
            engine: further arguments of `LLM`.

        Raises:
            ValueError: the model cannot be cut off there; see
                `vllm.interop.first_layers.shortened`.

        """
        from vllm.entrypoints.llm import LLM
        from vllm.interop.first_layers import engine_options

        options: dict[str, Any] = {
            "capture_consumers": ["inline"],
            "enable_prefix_caching": False,  # no two contexts of a corpus begin alike
        }
        if stop_at_layer is not None:
            options |= engine_options(stop_at_layer)
        return cls(LLM(model, **options | engine), device)

    def to_tokens(
        self,
        input: str | list[str],
        prepend_bos: bool | None = True,
        truncate: bool = True,
        move_to_device: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """Token ids `[texts, tokens]`, int64; shorter texts are padded at the end.

        Args:
            input: one text or several texts.
            prepend_bos: whether the first token is the tokenizer's BOS; None means
                True, as in TransformerLens.
            truncate: whether to truncate to the engine's `max_model_len` less one.
            move_to_device: whether to move the result to `cfg.device`.
            others: arguments of TransformerLens' `to_tokens`.

        Raises:
            TypeError: another argument would change the result.

        """
        refuse_those_with_effect("to_tokens", others)
        texts = [input] if isinstance(input, str) else input
        bos = self.tokenizer.bos_token_id
        rows = []
        for text in texts:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if prepend_bos is not False and bos is not None:
                ids = [bos, *ids]
            rows.append(ids[: self.cfg.n_ctx - 1] if truncate else ids)
        longest = max(map(len, rows), default=0)
        pad = self.tokenizer.pad_token_id
        fill = (pad if pad is not None else self.tokenizer.eos_token_id) or 0
        tokens = torch.tensor([ids + [fill] * (longest - len(ids)) for ids in rows])
        return tokens.to(self.cfg.device) if move_to_device else tokens

    @torch.compiler.disable  # with `compile_llm=True`, SAELens compiles this method
    def run_with_cache(
        self,
        tokens: torch.Tensor | str | list[str],
        names_filter: NamesFilter = None,
        stop_at_layer: int | None = None,
        prepend_bos: bool | None = True,
        device: str | torch.device | None = None,
        attention_mask: torch.Tensor | None = None,
        reset_hooks_end: bool = True,
        **others: Any,
    ) -> tuple[None, dict[str, torch.Tensor]]:
        """Activations of whole prompts; None stands in for the logits.

        Args:
            tokens: token ids `[batch, context]`, or text.
            names_filter: hook points in TransformerLens' names, or a predicate over the
                stream's hook points.
            stop_at_layer: ignored; `start` chooses how many layers run.
            prepend_bos: whether texts begin with BOS; ignored for ids.
            device: where the rows are returned; `cfg.device` by default.
            attention_mask: may be given if every token takes part.
            reset_hooks_end: ignored; there are no hooks.
            others: arguments of TransformerLens' `run_with_cache`, and SAELens'
                `model_kwargs`.

        Returns:
            `(None, {name: [batch, context, d_model]})`, in the model's dtype.

        Raises:
            TypeError: another argument would change the result.
            ValueError: a hook point is not served, or a prompt is too long; the message
                names it.

        """
        del stop_at_layer, reset_hooks_end
        refuse_those_with_effect("run_with_cache", others)
        if attention_mask is not None and not bool(torch.all(attention_mask != 0)):
            raise ValueError(
                "attention_mask: masked tokens are not served; give each call prompts "
                "of one length"
            )
        if not isinstance(tokens, torch.Tensor):
            tokens = self.to_tokens(tokens, prepend_bos=prepend_bos)
        if tokens.dim() == 1:
            tokens = tokens[None]
        names = self._names(names_filter)
        taps = taps_of(names)
        per_prompt = prompt_rows(self.llm, tokens.tolist(), list(taps.values()))
        cache = {
            name: torch.stack([rows[tap] for rows in per_prompt]).to(
                self.cfg.device if device is None else device
            )
            for name, tap in taps.items()
        }
        return None, cache

    def _names(self, names_filter: NamesFilter) -> list[str]:
        if isinstance(names_filter, str):
            return [names_filter]
        if names_filter is not None and not callable(names_filter):
            return list(names_filter)
        every = [
            f"blocks.{layer}.hook_resid_{place}"
            for layer in range(self.cfg.n_layers)
            for place in ("pre", "mid", "post")
        ]
        return [name for name in every if names_filter is None or names_filter(name)]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse logits and losses, which SAELens' evaluation asks for.

        Raises:
            NotImplementedError: always; the message has the remedy.

        """
        raise NotImplementedError(
            "a served model returns activations, but no logits or losses, and runs no "
            "Python hooks. SAELens' runner evaluates when it logs to Weights & Biases: "
            "set runner.evaluator = None before runner.run(), and evaluate a trained "
            "SAE with a HookedTransformer"
        )

    run_with_hooks = __call__

    def eval(self) -> "ServedModel":
        """Return this object; an engine is always in evaluation mode."""
        return self

    def to(self, *_: Any, **__: Any) -> "ServedModel":
        """Return this object; the engine is not moved."""
        return self


def refuse_those_with_effect(method: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments of TransformerLens that would change what a method returns.

    Raises:
        TypeError: there is one; the message names the first.

    """
    for name, value in arguments.items():
        if (
            value is not None
            and value is not False
            and WITHOUT_EFFECT.get(name) != value
        ):
            raise TypeError(
                f"{method}(): {name}={value!r} is not served here; leave it out"
            )
