# SPDX-License-Identifier: Apache-2.0
"""Converts vllm-activation-capture's environment variables to a consumer."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.v1.capture.errors import CaptureValidationError

NAME = "activation_capture"
"""The consumer's entry point, and the name of its result in responses."""

SWITCH = "VLLM_ACT_CAPTURE"
MODES = ("rp8", "full8", "topk8")
RETURNS = {
    "none": "none",
    "metadata": "metadata",
    "compressed": "compressed",
    # The stream is whole on every rank, so sharded and gathered files are the same.
    "sharded": "metadata",
    "gathered": "metadata",
}

_ON = ("1", "true", "on")
_OFF = ("", "0", "false", "off")
_PREFIX = "VLLM_ACT_"
_KNOWN = frozenset(
    _PREFIX + name
    for name in (
        "CAPTURE",
        "MODE",
        "RP_K",
        "RP_SEED",
        "TOPK_K",
        "BITS",
        "PER_DIM",
        "ATTNM",
        "RETURN",
        "RETURN_MODE",
        "OUTDIR",
        "HIDDEN_SIZE",
    )
)


def consumer_of(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The consumer that the variables ask for, in the form of `capture_consumers`.

    None if `VLLM_ACT_CAPTURE` is off or not set.

    Raises:
        CaptureValidationError: the message names the variable, its value and the
            remedy.

    """
    if not _flag(environment, SWITCH, "0"):
        return None
    for name, value in environment.items():
        if name.startswith(_PREFIX) and name not in _KNOWN:
            raise _wrong(name, value, f"the variables are {sorted(_KNOWN)}")
    _only(environment, "VLLM_ACT_BITS", "8", "values have 8 bits")
    _only(environment, "VLLM_ACT_ATTNM", "0", "attention is not summarised; unset it")
    mode = environment.get("VLLM_ACT_MODE", MODES[0])
    if mode not in MODES:
        raise _wrong("VLLM_ACT_MODE", mode, f"it must be one of {list(MODES)}")
    root = environment.get("VLLM_ACT_OUTDIR")
    params = {
        "root": root or str(Path(tempfile.gettempdir()) / "vllm_activations"),
        "mode": mode,
        "rp_k": _whole(environment, "VLLM_ACT_RP_K", 256, least=1),
        "rp_seed": _whole(environment, "VLLM_ACT_RP_SEED", 12345, least=0),
        "topk_k": _whole(environment, "VLLM_ACT_TOPK_K", 64, least=1),
        "per_dim_scale": _flag(environment, "VLLM_ACT_PER_DIM", "1"),
        "return_mode": _returned(environment),
    }
    if "VLLM_ACT_HIDDEN_SIZE" in environment:
        params["hidden_size"] = _whole(environment, "VLLM_ACT_HIDDEN_SIZE", 0, least=1)
    return {"name": NAME, "params": params}


def _returned(environment: Mapping[str, str]) -> str:
    given = {
        name: environment[name]
        for name in ("VLLM_ACT_RETURN_MODE", "VLLM_ACT_RETURN")
        if environment.get(name)
    }
    for name, value in given.items():
        if value not in RETURNS:
            raise _wrong(
                name,
                value,
                f"it must be one of {list(RETURNS)}; for summaries, load the files and "
                "call ActivationLoader.compute_layer_statistics",
            )
    return RETURNS[next(iter(given.values()), "metadata")]


def _whole(
    environment: Mapping[str, str], name: str, default: int, *, least: int
) -> int:
    text = environment.get(name) or str(default)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise _wrong(name, text, f"it must be an integer of at least {least}")
    return int(text)


def _flag(environment: Mapping[str, str], name: str, default: str) -> bool:
    text = environment.get(name, default)
    if text.lower() not in (*_ON, *_OFF):
        raise _wrong(name, text, "it must be 1 or 0")
    return text.lower() in _ON


def _only(environment: Mapping[str, str], name: str, value: str, remedy: str) -> None:
    given = environment.get(name) or value
    if given != value:
        raise _wrong(name, given, f"{remedy}; only {value!r} is supported")


def _wrong(name: str, value: str, remedy: str) -> CaptureValidationError:
    return CaptureValidationError(
        f"{name}={value[:60]!r}: {remedy}", parameter=name, value=value[:60]
    )
