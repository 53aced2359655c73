# SPDX-License-Identifier: Apache-2.0
"""The request interface of vllm-lens: `extra_args`, `vllm_xargs`, its client.

An engine that is started with `--vllm-lens-api` (`LLM(vllm_lens_api=True)`) honours
`output_residual_stream`, `apply_steering_vectors` and `apply_hooks`, and returns
`activations` and `hook_results`. The names are those of the package `vllm_lens`.
"""

from vllm.interop.vllm_lens.client import GenerateOutput, VLLMLensClient
from vllm.interop.vllm_lens.hook import Hook
from vllm.interop.vllm_lens.hook_wire import decode as deserialize_hook_results
from vllm.interop.vllm_lens.hook_wire import encode as serialize_hook_results
from vllm.interop.vllm_lens.steering_vector import SteeringVector
from vllm.interop.vllm_lens.tensors import decode as deserialize_tensor
from vllm.interop.vllm_lens.tensors import decode_all as decode_activations
from vllm.interop.vllm_lens.tensors import encode as serialize_tensor
from vllm.interop.vllm_lens.tensors import encode_all as serialize_activations
from vllm.v1.hooks.worker.context import HookContext

__all__ = [
    "GenerateOutput",
    "Hook",
    "HookContext",
    "SteeringVector",
    "VLLMLensClient",
    "decode_activations",
    "deserialize_hook_results",
    "deserialize_tensor",
    "serialize_activations",
    "serialize_hook_results",
    "serialize_tensor",
]
