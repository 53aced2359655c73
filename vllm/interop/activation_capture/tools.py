# SPDX-License-Identifier: Apache-2.0
"""What vllm-activation-capture's tools answer here: no model needs patching."""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Sequence

MODELS = ("qwen2", "qwen3", "llama", "opt", "mistral", "mixtral", "gpt2", "falcon")
"""The models that its tools know; any other module of vLLM's models may be named."""
ALL = "all"


def patch(arguments: Sequence[str] | None = None) -> int:
    """Say for each model whether its activations can be captured as it is.

    `patch_vllm_models` and `unpatch_vllm_models` are this: nothing is ever changed.

    Args:
        arguments: of the command; those of the process by default.

    Returns:
        The exit status: 1 if a model cannot be captured.

    """
    parser = argparse.ArgumentParser(
        description="Nothing needs patching in this build."
    )
    parser.add_argument("--check", action="store_true", help="Look at all models.")
    parser.add_argument("--model", default=ALL, help=f"One of {[*MODELS, ALL]}.")
    parser.add_argument("--all", action="store_true", help="As --model all.")
    args = parser.parse_args(arguments)
    named = [] if args.model == ALL else [args.model]
    return _say(MODELS if args.all or not named else named)


def check(arguments: Sequence[str] | None = None) -> int:
    """Check the installation, and with a model that its rows are right.

    Args:
        arguments: of the command; those of the process by default.

    Returns:
        The exit status: 1 if something is missing, or rows are wrong.

    """
    parser = argparse.ArgumentParser(description="Check that activations are captured.")
    parser.add_argument("--model", default=ALL, help="A name, or a model's folder.")
    parser.add_argument(
        "--full-test", metavar="MODEL", help="Also run `vllm check` on this model."
    )
    args = parser.parse_args(arguments)
    import vllm

    worker = importlib.import_module("vllm_capture.gpu_worker_capture").WorkerCapture
    print(f"vLLM {vllm.__version__} has hook points in its models")
    print(f"worker: {worker.__name__}, the platform's own")
    status = _say(MODELS if args.model == ALL else [args.model])
    if args.full_test is None:
        print("with --full-test MODEL its rows are compared with Transformers")
        return status
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "check"]
    return status or subprocess.run([*command, args.full_test]).returncode


def _say(models: Sequence[str]) -> int:
    """Print a line for each model; 1 if one cannot be captured."""
    status = 0
    for model in models:
        if layers := _layers(model):
            print(f"{model}: nothing needs patching ({', '.join(layers)})")
        else:
            print(
                f"{model}: no such module among vLLM's models, or it has no hook "
                "points; `vllm check MODEL` says why for a checkpoint",
                file=sys.stderr,
            )
            status = 1
    return status


def _layers(model: str) -> list[str]:
    """The names of the decoder layers of a module of vLLM's that have hook points."""
    try:
        module = importlib.import_module(f"vllm.model_executor.models.{model}")
    except ImportError:
        return []
    return sorted(
        name
        for name, kind in vars(module).items()
        if isinstance(kind, type) and getattr(kind, "hook_points", None)
    )
