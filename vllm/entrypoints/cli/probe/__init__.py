# SPDX-License-Identifier: Apache-2.0
"""`vllm probe`, with one module per command."""
