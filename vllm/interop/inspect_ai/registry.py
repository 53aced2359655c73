# SPDX-License-Identifier: Apache-2.0
"""The entry point through which Inspect finds the providers, imported on use."""

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="clearbox")
def clearbox() -> type[ModelAPI]:
    """The provider for a server with capture, steering and readouts."""
    from vllm.interop.inspect_ai.provider import ClearboxAPI

    return ClearboxAPI


@modelapi(name="vllm-lens")
def vllm_lens() -> type[ModelAPI]:
    """The provider for a server with the request interface of vllm-lens."""
    from vllm.interop.inspect_ai.provider import LensAPI

    return LensAPI
