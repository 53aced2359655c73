# SPDX-License-Identifier: Apache-2.0
"""Miniature decoder layers, one idiom each, written for the tests."""

from __future__ import annotations

from textwrap import dedent, indent

_HEAD = """\
import torch
from torch import nn
from vllm.model_executor.layers.layernorm import RMSNorm


class MiniDecoderLayer(nn.Module):
    def __init__(self, config):
        self.norm_a = RMSNorm(config.width)
        self.norm_b = RMSNorm(config.width)

"""


def layer(forward: str, more: str = "") -> str:
    """A module with one decoder layer whose forward is `forward`."""
    return _HEAD + indent(dedent(forward).strip(), "    ") + "\n" + dedent(more)


FUSED = layer(
    """
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
    """
)
SANDWICH = layer(
    """
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states = self.after_attn_norm(hidden_states)
        hidden_states, residual = self.norm_b(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.after_mlp_norm(hidden_states)
        return hidden_states, residual
    """
)
RENAMED_BRANCH = layer(
    """
    def forward(self, hidden_states, residual, **kwargs):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        written = torch.empty_like(hidden_states)
        self.mamba(hidden_states, written)
        hidden_states, residual = self.norm_b(written, residual)
        return self.mlp(hidden_states), residual
    """
)
PLAIN = layer(
    """
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output = self.attn(hidden_states=hidden_states)
        hidden_states = attn_output + residual
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states
    """
)
SCALED = layer(
    """
    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states = residual + hidden_states * self.multiplier
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states * self.multiplier
        return hidden_states
    """
)
STALE = layer(
    """
    def forward(self, positions, hidden_states, residual):
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states, residual
    """
)
PARALLEL = layer(
    """
    def forward(self, positions, hidden_states):
        normed = self.ln(hidden_states)
        attn_out = self.attn(positions, normed)
        mlp_out = self.mlp(normed)
        hidden_states = hidden_states + attn_out + mlp_out
        return hidden_states
    """
)
TWO_NORMS = layer(
    """
    def forward(self, positions, hidden_states):
        attn_out = self.attn(positions, self.ln_1(hidden_states))
        mlp_out = self.mlp(self.ln_2(hidden_states))
        hidden_states = mlp_out + attn_out + hidden_states
        return hidden_states
    """
)
REDUCED_LATE = layer(
    """
    def forward(self, positions, hidden_states):
        residual = hidden_states
        hidden_states = self.ln(hidden_states)
        attn_out = self.attn(positions, hidden_states)
        both = attn_out + self.mlp(hidden_states)
        both = tensor_model_parallel_all_reduce(both)
        hidden_states = residual + both
        return hidden_states
    """
)
FUSED_REDUCE = layer(
    """
    def forward(self, positions, hidden_states, residual):
        if residual is None:
            residual = hidden_states
            hidden_states = self.norm_a(hidden_states)
        else:
            hidden_states, residual = self.norm_a(hidden_states, residual)
        hidden_states = self.attn(positions, hidden_states)
        hidden_states, residual = fused_allreduce_rms_norm(
            hidden_states, residual, self.norm_b
        )
        hidden_states = self.mlp(hidden_states)
        return hidden_states, residual
    """
)
ALL = {
    name.lower(): source
    for name, source in list(globals().items())
    if name.isupper() and isinstance(source, str) and not name.startswith("_")
}
