# SPDX-License-Identifier: Apache-2.0
"""`vllm capture`: captures the rows of many prompts into a data set."""
