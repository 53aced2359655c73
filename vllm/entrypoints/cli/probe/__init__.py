# SPDX-License-Identifier: Apache-2.0
"""`vllm probe`, a module per command."""
