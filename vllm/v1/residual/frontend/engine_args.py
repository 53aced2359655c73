# SPDX-License-Identifier: Apache-2.0
"""The options of the features, and their configurations made from the options."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm.v1.capture.engine_args import capture_config
from vllm.v1.readouts.engine_args import readout_config
from vllm.v1.residual.frontend.named_files import named_files
from vllm.v1.residual.frontend.options import EngineOptions, add_options
from vllm.v1.residual.module_info import KnownModules
from vllm.v1.steering.frontend.engine_args import steering_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SchedulerConfig
    from vllm.engine.arg_utils import EngineArgs

__all__ = ["EngineOptions", "add_arguments", "configs"]


INTERP_CONFIGS = 16
"""Steering configurations at once, with `--interp`."""


class Interp(argparse.Action):
    """`--interp`: turns on what exploring a model needs; later options override it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Set the options."""
        consumers = list(namespace.capture_consumers or [])
        if "inline" not in consumers:
            namespace.capture_consumers = [*consumers, "inline"]
        namespace.enable_readouts = namespace.enable_steering = True
        namespace.enable_lens_page = True
        if namespace.max_steering_configs == parser.get_default("max_steering_configs"):
            namespace.max_steering_configs = INTERP_CONFIGS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options, in the order of the help text."""
    parser.add_argument(
        "--interp",
        action=Interp,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="To explore a model: --capture-consumers inline, --enable-readouts, "
        f"--enable-steering, --max-steering-configs {INTERP_CONFIGS} and, on a server, "
        "--enable-lens-page.",
    )
    add_options(parser)


def configs(
    args: "EngineArgs", model: "ModelConfig", scheduler: "SchedulerConfig"
) -> dict[str, Any]:
    """The features' fields of `VllmConfig`.

    Raises:
        VLLMValidationError: an option is invalid.

    """
    readouts = readout_config(args, model)
    # Files of vectors may name the modules of readouts.
    named = named_files(KnownModules(readouts.described))
    return {
        "capture_config": capture_config(args, model, scheduler),
        "steering_config": steering_config(args, model, named),
        "readout_config": readouts,
    }
