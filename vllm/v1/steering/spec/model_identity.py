# SPDX-License-Identifier: Apache-2.0
"""The earlier place of `vllm.v1.residual.model_identity`, for scripts that name it."""

from vllm.v1.residual.model_identity import digest_of_weights, identity_of_path

__all__ = ["digest_of_weights", "identity_of_path"]
