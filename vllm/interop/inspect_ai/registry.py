# SPDX-License-Identifier: Apache-2.0
"""What Inspect loads to find the providers; each is imported when it is used."""

from inspect_ai.model import ModelAPI, modelapi


@modelapi(name="clearbox")
def clearbox() -> type[ModelAPI]:
    """A server with capture, steering and readouts."""
    from vllm.interop.inspect_ai.provider import ClearboxAPI

    return ClearboxAPI


@modelapi(name="vllm-lens")
def vllm_lens() -> type[ModelAPI]:
    """A server with the request interface of vllm-lens."""
    from vllm.interop.inspect_ai.provider import LensAPI

    return LensAPI
