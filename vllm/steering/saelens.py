# SPDX-License-Identifier: Apache-2.0
"""Reads a feature of an SAE in SAELens' format: a row of its decoder.

The folder has `cfg.json`, which names the hook point as TransformerLens does, and
`sae_weights.safetensors` with `W_dec` `[d_sae, d_in]`. Releases before 6 have the hook
name at the top level, later ones under `metadata`.
"""

import json
import re
from pathlib import Path
from typing import Any

from vllm.steering.vectors import VectorSet, vector_set
from vllm.v1.residual.tap import Tap
from vllm.v1.steering.errors import fail
from vllm.v1.steering.spec.provenance import Provenance

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"

HOOK_NAMES = {
    "hook_resid_pre": "pre_attn",
    "hook_resid_mid": "post_attn",
    "hook_resid_post": "post_block",
    "hook_mlp_out": "mlp_out",
}
"""Our hook points by TransformerLens' names; both count blocks from 0."""

_PLACE = re.compile(r"blocks\.(\d{1,4})\.(\w+)")


def read_saelens(folder: str | Path, feature: int, tap: Tap | None = None) -> VectorSet:
    """Read the decoder row of a feature.

    Args:
        folder: written by SAELens' `save_model`, or the folder of a release.
        feature: index of the row.
        tap: `(layer, hook)` where the vector acts; by default the SAE's own.

    Raises:
        SteeringValidationError: the folder is not an SAE, the feature does not exist,
            or the SAE's hook point is not supported.

    """
    config = _config(Path(folder))
    meta = _meta(config)
    # The decoder of a transcoder writes to another hook point than its encoder reads.
    place = str(meta.get("hook_name_out") or meta.get("hook_name") or "")
    place = place or str(meta.get("hook_point") or "")
    row = _row(Path(folder) / WEIGHTS, feature)
    origin = (
        f"feature {feature} of the SAE {Path(folder).name} for "
        f"{meta.get('model_name', 'an unnamed model')} at {place or 'no named place'}"
    )
    return vector_set({tap or _tap(place): row}, Provenance(origin=origin), str(folder))


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fail(
            f"path: {str(folder)!r} is not an SAE in SAELens' form, which has {CONFIG} "
            f"and {WEIGHTS}: {error}",
            "path",
            str(folder),
        ) from None
    if not isinstance(config, dict):
        raise fail(f"path: {CONFIG} must hold an object", "path", str(folder))
    return config


def _meta(config: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for name in ("meta", "metadata"):
        if isinstance(inner := config.get(name), dict):
            found |= {key: value for key, value in inner.items() if value is not None}
    return found


def _tap(place: str) -> Tap:
    found = _PLACE.fullmatch(place)
    if found is None or found[2] not in HOOK_NAMES:
        raise fail(
            f"path: the SAE is at {place!r}; only {list(HOOK_NAMES)} are hook points "
            "here. Give the vector's place with --hook and --layer",
            "path",
            place,
        )
    return int(found[1]), HOOK_NAMES[found[2]]


def _row(file: Path, feature: int) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            decoder = opened.get_slice("W_dec")
            shape = decoder.get_shape()
            if len(shape) == 2 and 0 <= feature < shape[0]:
                return decoder[feature]  # Reads this row only.
    except (SafetensorError, OSError) as error:
        raise fail(
            f"path: {file.name!r} has no decoder W_dec: {error}", "path", str(file)
        ) from None
    raise fail(
        f"feature: W_dec has the shape {shape}, so features are 0 to {shape[0] - 1}",
        "feature",
        feature,
    )
