# SPDX-License-Identifier: Apache-2.0
"""Creates, saves and evaluates SAEs with SAELens."""

from pathlib import Path

import torch
from sae_lens import SAE

D_IN, D_SAE = 24, 96

ARCHITECTURES = {
    "standard": {},
    "gated": {},
    "jumprelu": {},
    "topk": {"k": 7},
    "topk_rescaled": {"k": 7, "rescale_acts_by_decoder_norm": True},
    "abstopk": {"k": 7},
    "constant_norm": {"normalize_activations": "constant_norm_rescale"},
    "layer_norm": {"normalize_activations": "layer_norm"},
    "transcoder": {"d_out": 12, "apply_b_dec_to_input": False},
    "skip_transcoder": {"d_out": 12, "apply_b_dec_to_input": False},
    "jumprelu_transcoder": {"d_out": 12, "apply_b_dec_to_input": False},
    "jumprelu_skip_transcoder": {"d_out": 12, "apply_b_dec_to_input": False},
}
_CLASSES = {"topk_rescaled": "topk", "constant_norm": "standard"}
_CLASSES["layer_norm"] = "standard"


def main(out: Path) -> None:
    """Write what SAELens' `save_model` writes, a folder for each architecture.

    Beside it is `reference.pt` with rows, activations and reconstructions.
    """
    torch.manual_seed(0)
    rows = torch.randn(64, D_IN)
    for name, config in ARCHITECTURES.items():
        given = {
            "architecture": _CLASSES.get(name, name),
            "d_in": D_IN,
            "d_sae": D_SAE,
            "device": "cpu",
            "dtype": "float32",
            "metadata": {"hook_name": "blocks.2.hook_resid_post"},
            **config,
        }
        sae = SAE.from_dict(given)
        with torch.no_grad():
            for label, parameter in sae.named_parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.3)
                if label == "threshold":
                    parameter.abs_()
            activations = sae.encode(rows)
            # Last, because decoding uses the norms of the rows encoded last.
            restored = sae.decode(activations)
            if "skip" in name:
                restored = restored + rows @ sae.W_skip.T
        sae.save_model(out / name)
        found = {"rows": rows, "activations": activations, "restored": restored}
        torch.save(found, out / name / "reference.pt")
