# SPDX-License-Identifier: Apache-2.0
"""Model providers of Inspect AI: `clearbox/MODEL` and `vllm-lens/MODEL`."""
