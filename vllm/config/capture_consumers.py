# SPDX-License-Identifier: Apache-2.0
"""The configuration of consumers, where plug-ins of an earlier fork look for it."""

from collections.abc import Iterable, Sequence

from vllm.config.capture import CaptureConfig as CaptureConsumersConfig
from vllm.config.capture import ConsumerConfig as CaptureConsumerSpec
from vllm.config.capture import parse_consumer as parse_consumer_spec
from vllm.v1.residual.numbers import layer_index
from vllm.v1.residual.tap import (
    HOOK_NAMES,
    INNER_POINTS,
    MLP_POINTS,
    Tap,
    hook_name,
    parse_address,
)

__all__ = [
    "CaptureConsumerSpec",
    "CaptureConsumersConfig",
    "expand_graphsafe_keys",
    "parse_consumer_spec",
    "validate_consumer_specs",
]


def validate_consumer_specs(specs: Sequence[CaptureConsumerSpec]) -> None:
    """Check that all consumers have names, and different ones.

    Raises:
        ValueError: they do not.

    """
    if not all(spec.name.strip() for spec in specs):
        raise ValueError("a capture consumer must have a name")
    CaptureConsumersConfig(consumers=list(specs))


def expand_graphsafe_keys(shorthands: Iterable[str], num_layers: int) -> list[Tap]:
    """The taps that `LAYER:HOOK` stand for, sorted, each once.

    Args:
        shorthands: keys, in which "all" stands for each layer, or for each hook point
            of the stream.
        num_layers: of the model.

    Raises:
        ValueError: a key has another form, or the model has no such layer.

    """
    return sorted({tap for key in shorthands for tap in _taps(key, num_layers)})


def _taps(key: str, num_layers: int) -> Iterable[Tap]:
    layer, _, hook = key.partition(":")
    address = parse_address(key)
    index, name = address or (layer_index(layer), hook_name(hook))
    if (index is None and layer != "all") or (name is None and hook != "all"):
        raise ValueError(
            f"{key!r} is not LAYER:HOOK, such as 3:post_block; the hook points are "
            f'{list(HOOK_NAMES)}, and "all" stands for each'
        )
    if index is not None and index >= num_layers:
        raise ValueError(
            f"{key!r}: this model's layers are 0 to {num_layers - 1}; name one of them"
        )
    layers = range(num_layers) if index is None else [index]
    others = (*MLP_POINTS, *INNER_POINTS)
    stream = [point for point in HOOK_NAMES if point not in others]
    hooks = stream if name is None else [name]
    return [(number, point) for number in layers for point in hooks]
