# SPDX-License-Identifier: Apache-2.0
"""The names of hook points, where plug-ins may look for them."""

from vllm.v1.residual.tap import HOOK_NAMES

VALID_HOOK_POINT_NAMES = frozenset(HOOK_NAMES)
"""Every name there is; a model may lack some."""
