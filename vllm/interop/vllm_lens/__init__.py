# SPDX-License-Identifier: Apache-2.0
"""The request interface of vllm-lens: `extra_args`, `vllm_xargs`, its client.

An engine started with `--vllm-lens-api` (`LLM(vllm_lens_api=True)`) honours
`output_residual_stream` and `apply_steering_vectors`, and returns `activations`.
"""

from vllm.interop.vllm_lens.client import GenerateOutput, VLLMLensClient
from vllm.interop.vllm_lens.steering_vector import SteeringVector

__all__ = ["GenerateOutput", "SteeringVector", "VLLMLensClient"]
