# SPDX-License-Identifier: Apache-2.0
"""Readers of captured files, under the import name that scripts use."""

from vllm.interop.activation_capture.analysis import (
    ActivationLoader,
    compare_tokens,
    load_activation_file,
    load_activation_manifest,
    load_sequence_activations,
    quick_load,
    reconstruct_activations,
)

__all__ = [
    "ActivationLoader",
    "compare_tokens",
    "load_activation_file",
    "load_activation_manifest",
    "load_sequence_activations",
    "quick_load",
    "reconstruct_activations",
]
