# SPDX-License-Identifier: Apache-2.0
"""The global spec in the parameters of a storage consumer."""

from typing import TYPE_CHECKING, Any

from vllm.v1.capture.errors import CaptureValidationError, fail
from vllm.v1.capture.types import CaptureContext, CaptureSpec, VllmInternalRequestId
from vllm.v1.residual.plain_data import plain
from vllm.v1.residual.row_selection import parse_hooks

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def global_spec(
    hooks: Any, positions: Any, vllm_config: "VllmConfig | None", where: str
) -> CaptureSpec | None:
    """Parse `global_hooks` and `global_positions`.

    Only the front end uses the spec, where the model's hook points are known. In a
    worker the layer selectors are not resolved.

    Args:
        hooks: hook point -> layer selector, or the text `HOOK:LAYER` or `HOOK:all`;
            None if nothing is captured globally.
        positions: a position selector.
        vllm_config: the engine's configuration.
        where: the consumer's name in messages.

    Raises:
        CaptureValidationError: names the parameter, the value and the remedy.

    """
    if hooks is None:
        return None
    hooks = plain(hooks)
    if isinstance(hooks, str) and ":" in hooks:
        hook, _, layers = hooks.partition(":")
        hooks = {hook: [int(layers)] if layers.isdecimal() else layers}
    if not isinstance(hooks, dict):
        raise CaptureValidationError(
            f"{where}.global_hooks must map hook points to layers, for example "
            '{"post_block": [0]}',
            parameter=f"{where}.global_hooks",
            value=hooks,
        )
    points = vllm_config.capture_config.hook_points if vllm_config else None
    if points:
        ctx = CaptureContext(
            vllm_internal_request_id=VllmInternalRequestId("start-up"),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            num_hidden_layers=max(points) + 1,
            hidden_size=1,
            element_size_bytes=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            hook_points={layer: tuple(names) for layer, names in points.items()},
        )
        hooks = parse_hooks(hooks, ctx, f"{where}.global_hooks", fail)
    return CaptureSpec(hooks, positions)
