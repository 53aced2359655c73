# SPDX-License-Identifier: Apache-2.0
"""TransformerLens' `RemoteBridge`, with the `generate` of its `TransformerBridge`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformer_lens.model_bridge.remote_bridge import RemoteBridge

REFUSED = {
    "freq_penalty": "it counts the prompt's tokens there; use repetition_penalty",
    "output_logits": "use forward on the returned tokens",
    "padding_side": "prompts are not padded; give texts, or prompts of one length",
    "attention_mask": "prompts are not padded; give texts, or prompts of one length",
    "pixel_values": "only text is generated here",
    "stopping_criteria": "functions are not called here; use stop_strings",
    "forced_bos_token_id": "it is for encoder-decoder models",
}
"""Arguments of `generate` that are not supported, and what to use instead."""


class ServedBridge(RemoteBridge):
    """A `RemoteBridge` that generates."""

    def generate(
        self,
        input: str | list[str] | torch.Tensor = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | list[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        *,
        repetition_penalty: float = 1.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
        return_cache: bool = False,
        return_input_tokens: bool = False,
        names_filter: Any = None,
        device: Any = None,
        stop_strings: str | list[str] | None = None,
        intervene: Mapping[str, Any] | None = None,
        **unsupported: Any,
    ) -> Any:
        """Sample tokens, as `TransformerBridge.generate` does.

        Args:
            input: a text, texts, or token ids `[prompts, tokens]`.
            max_new_tokens: most tokens per prompt.
            stop_at_eos: whether a prompt ends with the end-of-sequence token.
            eos_token_id: the token or tokens; by default the tokenizer's.
            do_sample: False takes the likeliest tokens.
            top_k: number of tokens to sample from; None for all.
            top_p: probability mass to sample from; None for all.
            temperature: of the distribution.
            repetition_penalty: above 1 makes tokens of the prompt and of the output
                less likely.
            use_past_kv_cache: without effect, as results are the same.
            prepend_bos: whether texts begin with BOS; by default as the model's do.
            return_type: `"str"`, `"tokens"`, or `"input"` for the type of the input.
            verbose: without effect, as there.
            return_cache: whether to also return the cache of the whole text of one
                prompt, which takes another forward pass.
            return_input_tokens: whether to also return the prompts' token ids.
            names_filter: of `run_with_cache`.
            device: of `run_with_cache`.
            stop_strings: a prompt ends with one of these.
            intervene: as in `forward`; without `pos` also at generated tokens.
            unsupported: arguments that are refused unless they are off.

        Raises:
            ValueError: an argument is unsupported; the message names the remedy.

        """
        del use_past_kv_cache, verbose
        _refuse(unsupported)
        prompts = self._prompts(input, prepend_bos)
        if return_cache and len(prompts) > 1:
            raise ValueError("return_cache: give one prompt, or use run_with_cache")
        sampling: dict[str, Any] = {
            "max_tokens": max_new_tokens,
            "temperature": temperature if do_sample else 0.0,
            "top_k": top_k or -1,
            "top_p": 1.0 if top_p is None else top_p,
            "repetition_penalty": repetition_penalty,
            "ignore_eos": True,  # Only the tokens below end a prompt.
        }
        ends = self._ends(eos_token_id) if stop_at_eos else []
        if ends:
            sampling["stop_token_ids"] = ends
        if stop_strings:
            given = [stop_strings] if isinstance(stop_strings, str) else stop_strings
            sampling |= {"stop": list(given), "include_stop_str_in_output": True}
        made = self._driver.generate(prompts, sampling, intervene)
        fill = ends[0] if ends else self._padding()
        tokens = rectangle(prompts, made, self._padding(), fill)
        as_text = return_type == "str" or (
            return_type == "input" and not isinstance(input, torch.Tensor)
        )
        found: Any = tokens
        if as_text:
            whole = [[*prompt, *new] for prompt, new in zip(prompts, made)]
            texts = self.tokenizer.batch_decode(whole, skip_special_tokens=True)
            found = texts[0] if len(texts) == 1 else texts
        more = []
        if return_cache:
            _, cache = self.run_with_cache(
                tokens, names_filter=names_filter, device=device, return_type=None
            )
            more.append(cache)
        if return_input_tokens:
            more.append(rectangle(prompts, [[]] * len(prompts), self._padding(), fill))
        return (found, *more) if more else found

    def _prompts(self, input: Any, prepend_bos: bool | None) -> list[list[int]]:
        """Token ids of each prompt, without padding."""
        if isinstance(input, torch.Tensor):
            ids: list[list[int]] = torch.atleast_2d(input).tolist()
            return ids
        texts = [input] if isinstance(input, str) else input
        return [
            self.to_tokens(text, prepend_bos=prepend_bos, truncate=False)[0].tolist()
            for text in texts
        ]

    def _ends(self, given: int | list[int] | None) -> list[int]:
        if given is None:
            given = getattr(self.cfg, "eos_token_id", None)
        if given is None:
            given = self.tokenizer.eos_token_id
        if given is None:
            raise ValueError(
                "eos_token_id: the tokenizer has none; give one, or stop_at_eos=False"
            )
        return [given] if isinstance(given, int) else list(given)

    def _padding(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)


def rectangle(
    prompts: Sequence[Sequence[int]],
    made: Sequence[Sequence[int]],
    before: int,
    after: int,
) -> torch.Tensor:
    """Prompts with what was generated, `[prompts, tokens]`.

    Shorter prompts begin with `before`, and shorter outputs end with `after`.
    """
    start, end = max(map(len, prompts)), max(map(len, made))
    rows = []
    for prompt, new in zip(prompts, made, strict=True):
        head, tail = [before] * (start - len(prompt)), [after] * (end - len(new))
        rows.append([*head, *prompt, *new, *tail])
    return torch.tensor(rows)


def _refuse(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if value is None or value is False or (name == "freq_penalty" and not value):
            continue
        remedy = REFUSED.get(name, "generate has no such argument")
        raise ValueError(f"{name}: {remedy}")
