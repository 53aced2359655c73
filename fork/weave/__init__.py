# SPDX-License-Identifier: Apache-2.0
"""Finds the residual stream in decoder layers and inserts hook points.

Imports in this package are relative: the build runs it from the checkout, and an
installed fork has it as `vllm.model_executor.residual_weave`.
"""
