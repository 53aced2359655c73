# SPDX-License-Identifier: Apache-2.0
"""Chooses where to read rows that are steered at their own hook point.

A capture sees the stream before the steering at its point; in interp-engine, reads come
after it.
"""

from collections.abc import Mapping
from typing import Any

from vllm.v1.residual.tap import Tap


def readable_tap(tap: Tap, vectors: Mapping[str, Any] | None, num_layers: int) -> Tap:
    """The tap whose rows are those of `tap` after its own steering.

    Raises:
        ValueError: there is no such tap.

    """
    layer, hook = tap
    if layer not in (vectors or {}).get(hook, {}):
        return tap
    if hook == "post_block" and layer + 1 < num_layers:
        # The input of the next layer is captured before its steering there.
        return layer + 1, "pre_attn"
    raise ValueError(
        f"{hook} of layer {layer} is read and steered at once, and no later point has "
        "the same stream: steer there, and read another point"
    )
