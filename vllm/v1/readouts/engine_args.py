# SPDX-License-Identifier: Apache-2.0
"""The configuration of readouts and SAEs, made from the options."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.readouts import ReadoutConfig
from vllm.exceptions import VLLMValidationError
from vllm.v1.readouts.errors import fail
from vllm.v1.readouts.modules import (
    check_model,
    check_place,
    describe_module,
    load_module,
)
from vllm.v1.residual.before_fork import end_openmp_threads
from vllm.v1.residual.model_identity import identity_of_config
from vllm.v1.residual.module_info import ModuleInfo
from vllm.v1.residual.named_paths import named_paths
from vllm.v1.residual.plugin_errors import described
from vllm.v1.residual.sizes import num_layers
from vllm.v1.residual.tap import HOOK_NAMES, INNER_POINTS, Tap

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def readout_config(args: "EngineArgs", model_config: "ModelConfig") -> ReadoutConfig:
    """Build the configuration from the engine's arguments.

    Module files are read here, so that an invalid file is reported before the model is
    loaded.

    Raises:
        ReadoutValidationError: an option or a file is invalid.

    """
    modules = named_paths(args.readout_modules, "--readout-modules", fail)
    saes = named_paths(args.sae, "--sae", fail)
    if both := sorted(modules.keys() & saes.keys()):
        raise fail(
            f"--sae {both[0]!r}: a readout module has this name; give one of them "
            "another",
            "sae",
            both[0],
        )
    enabled = args.enable_readouts or args.interp_engine_api or bool(modules)
    if (enabled or saes) and envs.VLLM_USE_RUST_FRONTEND:
        raise fail(
            "--enable-readouts: the Rust front end (VLLM_USE_RUST_FRONTEND=1) drops "
            "their fields; unset it to use readouts",
            "enable_readouts",
            True,
        )
    described = {
        name: described_file(
            name, path, model_config, "sae" if name in saes else "module"
        )
        for name, path in {**modules, **saes}.items()
    }
    if described:
        end_openmp_threads()
    return ReadoutConfig(
        enabled=enabled, modules=modules, saes=saes, described=described
    )


def described_file(
    name: str,
    path: str,
    model: "ModelConfig",
    wanted: str = "",
    tap: Tap | None = None,
) -> dict[str, Any]:
    """Read a module file and return the fields of its `ModuleInfo`.

    Args:
        name: the module's name, also used in error messages.
        path: the file or folder.
        model: the served model.
        wanted: `sae` or `module` to require one of them; empty accepts both.
        tap: `(layer, hook)` for an SAE that does not state its own.

    Raises:
        ReadoutValidationError: the file is invalid, of the wrong kind, or for another
            model or hidden size.

    """
    try:
        info = describe_module(name, path, load_module(name, path, tap))
    except VLLMValidationError:
        raise
    except Exception as error:  # Whatever a library raises for a damaged file.
        raise fail(
            f"{name}: {path!r} cannot be read: {described(error)}", "path", path
        ) from error
    if wanted and (info.kind == "sae") != (wanted == "sae"):
        what, option, route = f"a {info.kind}", "--readout-modules", "readouts/modules"
        if info.kind == "sae":
            what, option, route = "an SAE", "--sae", "sae"
        raise fail(
            f"{name}: {path!r} holds {what}; give it as {option}, or to "
            f"/v1/{route}/register",
            "path",
            path,
        )
    width = model.get_hidden_size()
    # The widths of points inside the block are known once the model is loaded.
    inside = info.tap is not None and info.tap[1] in INNER_POINTS
    if info.width != width and not inside:
        raise fail(
            f"{name}: it is for rows of width {info.width}, and this model's have "
            f"{width}; is it of another model?",
            "path",
            path,
        )
    # Which hook points a layer has is known once the model is loaded.
    layers = range(num_layers(model))
    check_place(info, dict.fromkeys(layers, HOOK_NAMES))
    check_model(info, identity_of_config(model))
    return asdict(info)


def check_places(config: "VllmConfig") -> None:
    """Refuse configured modules for hook points that the loaded model does not have.

    Raises:
        ReadoutValidationError: naming the module and its place.

    """
    points = config.capture_config.hook_points or {}
    for info in config.readout_config.described.values():
        check_place(ModuleInfo(**info), points)
