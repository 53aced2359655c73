# SPDX-License-Identifier: Apache-2.0
"""The request interface of vllm-lens: `extra_args`, `vllm_xargs`, its client.

An engine that is started with `--vllm-lens-api` (`LLM(vllm_lens_api=True)`) honours
`output_residual_stream`, `apply_steering_vectors` and `apply_hooks`, and returns
`activations` and `hook_results`.
"""

from vllm.interop.vllm_lens.client import GenerateOutput, VLLMLensClient
from vllm.interop.vllm_lens.hook import Hook
from vllm.interop.vllm_lens.steering_vector import SteeringVector

__all__ = ["GenerateOutput", "Hook", "SteeringVector", "VLLMLensClient"]
