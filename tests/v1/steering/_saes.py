# SPDX-License-Identifier: Apache-2.0
"""Tiny random SAEs and transcoders, as files."""

from pathlib import Path
from typing import Any

from tests.v1.residual.sae import _layouts
from tests.v1.steering import _models

FEATURES = 200
TAP = (1, "post_block")
NAMES = ("W_enc", "W_dec", "b_enc", "b_dec")
TRANSCODERS = {
    "within": ("blocks.1.hook_resid_mid", "none"),
    "across": ("blocks.0.hook_resid_post", "layer_norm"),
    "rescaled": ("blocks.1.hook_resid_pre", "constant_norm_rescale"),
}
"""By name, where it reads, and how it normalizes; all write to `TAP`."""
SELECTING = ("layers.1.mlp", "layers.0.mlp")
"""Transcoders of MLPs that select the largest of all features, and of each group."""
PLACE = {"hook_name": "blocks.1.hook_resid_post"}


def write_saes(folder: Path) -> dict[str, str]:
    parts = _layouts.parts(3, _models.HIDDEN, FEATURES)
    jump, standard = (
        _layouts.chosen(parts, *NAMES, *more) for more in (["threshold"], [])
    )
    options: dict[str, Any] = {"metadata": PLACE, "d_in": _models.HIDDEN}
    _layouts.saelens(folder / "jump", jump, architecture="jumprelu", **options)
    _layouts.saelens(folder / "topk", standard, architecture="topk", k=60, **options)
    _layouts.saelens(
        folder / "abstopk", standard, architecture="abstopk", k=90, **options
    )
    for name, (reads, norm) in TRANSCODERS.items():
        skips = _layouts.chosen(parts, *NAMES, "threshold", "W_skip")
        _layouts.saelens(
            folder / name,
            skips,
            architecture="jumprelu_skip_transcoder",
            d_in=_models.HIDDEN,
            d_out=_models.HIDDEN,
            metadata={"hook_name": reads, "hook_name_out": PLACE["hook_name"]},
            normalize_activations=norm,
        )
    for name, activation in zip(SELECTING, ("topk", "groupmax"), strict=True):
        said = {"d_in": _models.HIDDEN, "num_latents": FEATURES, "k": 50}
        _layouts.sparsify(
            folder / name, parts, transcode=True, activation=activation, **said
        )
    for norm in ("constant_norm_rescale", "layer_norm"):
        _layouts.saelens(
            folder / norm,
            standard,
            architecture="standard",
            normalize_activations=norm,
            **options,
        )
    return {path.name: str(path) for path in sorted(folder.iterdir())}
