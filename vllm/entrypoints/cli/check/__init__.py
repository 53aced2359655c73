# SPDX-License-Identifier: Apache-2.0
"""`vllm check`: whether captured rows are those of the Transformers library."""
