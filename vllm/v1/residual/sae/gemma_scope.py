# SPDX-License-Identifier: Apache-2.0
"""Gemma Scope 1 (`params.npz`) and 2 (`params.safetensors`): JumpReLU.

Both have W_enc `[d_in, d_sae]`, W_dec `[d_sae, d_out]` and a threshold per feature and
do not subtract b_dec. The path contains the SAE's place, such as
`gemma-scope-2b-pt-res/layer_20/width_16k/average_l0_71`; for the second series
`config.json` does too.
"""

import re
from pathlib import Path

from vllm.v1.residual.sae.files import (
    bad_file,
    read_settings,
    read_tensors,
    take,
    take_optional,
)
from vllm.v1.residual.sae.fold import RawSAE
from vllm.v1.residual.sae.places import numbered, residual_after, transformers
from vllm.v1.residual.sae.record import SAEPlace

FIRST, SECOND = "params.npz", "params.safetensors"


def read_gemma_scope(folder: Path) -> RawSAE:
    """Read the SAE or transcoder in a folder of Gemma Scope."""
    path = folder / FIRST
    if not path.is_file():
        path = folder / SECOND
    tensors = read_tensors(path)
    w_enc = take(tensors, path, "w_enc", "W_enc")
    w_dec = take(tensors, path, "w_dec", "W_dec")
    if w_dec.ndim == 3:
        raise bad_file(path, "a cross-layer transcoder, which writes to several layers")
    reads, writes = _places(folder.absolute())
    # SAEs of embeddings were trained before Gemma scales these by sqrt(d).
    scale = w_enc.shape[0] ** 0.5 if reads.name == "embedding" else 1.0
    skip = take_optional(tensors, path, "affine_skip_connection")
    return RawSAE(
        w_enc=w_enc / scale,
        w_dec=w_dec * scale,
        b_enc=take(tensors, path, "b_enc"),
        b_dec=take(tensors, path, "b_dec"),
        threshold=take(tensors, path, "threshold"),
        w_skip=skip,
        reads=reads,
        writes=writes,
        model=_model(folder),
    )


def _model(folder: Path) -> str:
    config = folder / "config.json"
    if config.is_file():
        return str(read_settings(config).get("model_name") or "")
    found = re.search(r"gemma-scope-(?:2-)?(\w+-(?:pt|it))", str(folder.absolute()))
    if found is None:
        return ""
    series = "gemma-3" if "gemma-scope-2-" in str(folder.absolute()) else "gemma-2"
    return f"google/{series}-{found[1].removesuffix('-pt')}"


def _places(folder: Path) -> tuple[SAEPlace, SAEPlace | None]:
    config = folder / "config.json"
    if config.is_file():
        said = read_settings(config)
        name = str(said.get("hf_hook_point_in") or "")
        out = said.get("hf_hook_point_out")
        transcodes = out is not None and out != name
        place = transformers(name)
        return place, transformers(str(out)) if transcodes else None
    text = str(folder)
    layer = numbered(r"layer_(\d+)", text)
    if "transcoder" in text:
        name = f"model.layers.{layer}"
        return (
            transformers(f"{name}.pre_feedforward_layernorm.output"),
            transformers(f"{name}.post_feedforward_layernorm.output"),
        )
    if re.search(r"[/_-]embedding", text):
        return SAEPlace("embedding", (0, "pre_attn")), None
    for kind in ("att", "mlp"):
        if re.search(rf"(-|/|_){kind}(_|/|$|-)", text) or f"{kind}_out" in text:
            # Those of attention read heads before the output projection, flattened.
            after = f"model.layers.{layer}.post_feedforward_layernorm.output"
            name = f"{kind} of layer {layer}"
            return transformers(after) if kind == "mlp" else SAEPlace(name), None
    return residual_after(layer, f"stream after layer {layer}"), None
