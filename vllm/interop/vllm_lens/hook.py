# SPDX-License-Identifier: Apache-2.0
"""vllm-lens' hooks."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Hook:
    """A function that runs inside the forward pass, at the end of layers.

    Args:
        fn: `fn(ctx, h) -> Tensor | None`, with `h` `[seq_len, hidden_size]` and a
            `vllm.v1.hooks.worker.context.HookContext`; or the name of an installed one
            (entry points `vllm.hooks`), or `{"name", "params"}`.
        layer_indices: 0-based layers.
        pre: whether it runs at the start of the layers instead of the end.

    """

    fn: Callable[..., Any] | str | dict[str, Any]
    layer_indices: Sequence[int]
    pre: bool = False

    def __post_init__(self) -> None:
        if not self.layer_indices:
            raise ValueError("layer_indices is empty: name one layer or more")

    @classmethod
    def model_validate(cls, raw: "Hook | dict[str, Any]") -> "Hook":
        """The hook of what `model_dump` returns; a pickled function is loaded."""
        if isinstance(raw, Hook):
            return raw
        fn = raw["fn"]
        if isinstance(fn, dict) and "cloudpickle" in fn:
            import cloudpickle

            fn = cloudpickle.loads(base64.b64decode(fn["cloudpickle"]))
        return cls(fn, raw["layer_indices"], raw.get("pre", False))

    def model_dump(self) -> dict[str, Any]:
        """The hook as JSON; a function becomes `{"cloudpickle": base64}`."""
        fn = self.fn
        if isinstance(fn, str):
            sent: dict[str, Any] = {"name": fn}
        elif isinstance(fn, dict):
            sent = fn
        else:
            import cloudpickle

            sent = {"cloudpickle": base64.b64encode(cloudpickle.dumps(fn)).decode()}
        return {"fn": sent, "layer_indices": list(self.layer_indices), "pre": self.pre}
