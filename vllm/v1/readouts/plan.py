# SPDX-License-Identifier: Apache-2.0
"""The former place of `vllm.v1.residual.readout_plan`."""

from vllm.v1.residual.readout_plan import *  # noqa: F403
