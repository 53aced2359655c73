# SPDX-License-Identifier: Apache-2.0
"""Environment variables of this fork.

They are not in upstream's table of variables, because that is logged and is part of
compile-cache keys, and one of these is a secret.
"""

NAMES = frozenset({"VLLM_STEERING_API_KEY", "VLLM_MAX_BODY_BYTES"})

ACTIVATION_CAPTURE = "VLLM_ACT_"
"""How those of vllm-activation-capture begin, which its adapter checks."""


def is_own(name: str) -> bool:
    """Whether a variable has a meaning here that upstream does not know."""
    return name in NAMES or name.startswith(ACTIVATION_CAPTURE)
