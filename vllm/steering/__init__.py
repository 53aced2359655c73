# SPDX-License-Identifier: Apache-2.0
"""Getting steering vectors: extracting, converting, trying them out.

What an engine does with vectors is in `vllm.v1.steering`.
"""
