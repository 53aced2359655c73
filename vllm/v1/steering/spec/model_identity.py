# SPDX-License-Identifier: Apache-2.0
"""The identity of a model, against which vectors are checked, under its first name."""

from vllm.v1.residual.model_identity import (
    ModelIdentity,
    digest_of_weights,
    identity_of_path,
)

__all__ = ["ModelIdentity", "digest_of_weights", "identity_of_path"]
