# SPDX-License-Identifier: Apache-2.0
"""The engine's configuration includes capture and steering."""

from fork.language import add_field, add_import, after, last

EDITS = [
    add_import(
        "from .residual import CaptureConfig, ReadoutConfig, SteeringConfig",
        why="The types of the fields.",
    ),
    add_field(
        scope="VllmConfig",
        after="aux_output_config",
        insert='''
capture_config: CaptureConfig = Field(default_factory=CaptureConfig)
"""Activation capture configuration."""
steering_config: SteeringConfig = Field(default_factory=SteeringConfig)
"""Steering configuration."""
readout_config: ReadoutConfig = Field(default_factory=ReadoutConfig)
"""Configuration of readouts and sparse autoencoders."""
''',
        why="Every process reads its configuration from here.",
    ),
    last(
        scope="VllmConfig",
        insert='''
@property
def capture_consumers_config(self) -> CaptureConfig | None:
    """`capture_config`, or None where nothing captures."""
    return self.capture_config if self.capture_config.enabled else None
''',
        why="Plug-ins that were written for another fork read it.",
    ),
    after(
        scope="VllmConfig.compute_hash",
        anchor="vllm_factors.append(self.aux_output_config.compute_hash())",
        insert="""
vllm_factors.append(self.capture_config.compute_hash())
vllm_factors.append(self.steering_config.compute_hash())
""",
        why="Taps change the traced graph, so they are part of the compile-cache key.",
    ),
]
