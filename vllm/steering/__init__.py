# SPDX-License-Identifier: Apache-2.0
"""Tools for steering vectors: extraction, conversion and evaluation.

How an engine applies vectors is in `vllm.v1.steering`.
"""
