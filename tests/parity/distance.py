# SPDX-License-Identifier: Apache-2.0
"""The distance between rows."""

import torch


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row, relative to that row's norm in `expected`."""
    if found.shape != expected.shape:
        return float("inf")
    error = (found.float() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    # If zeros are expected, any other value is wrong.
    parts = torch.where(size > 0, error / size, torch.where(error > 0, torch.inf, 0.0))
    return float(parts.max()) if parts.isfinite().all() else float("inf")


def at_point(hook: str, found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error of a row of a hook point.

    Rounding in a router depends on what it reads, not on the few logits that it makes:
    errors of these are relative to the root mean square of the rows' norms.
    """
    if hook != "router_logits" or found.shape != expected.shape:
        return relative(found, expected)
    size = expected.norm(dim=-1).square().mean().sqrt()
    return float((found.float() - expected).norm(dim=-1).max() / size)
