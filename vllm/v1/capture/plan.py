# SPDX-License-Identifier: Apache-2.0
"""The former place of `vllm.v1.residual.capture_plan`."""

from vllm.v1.residual.capture_plan import *  # noqa: F403
