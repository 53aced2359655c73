# SPDX-License-Identifier: Apache-2.0
"""Finds the residual stream in decoder layers and puts hook points on it.

Imports in here are relative: the build runs these modules from the checkout, and an
installed fork has them as `vllm.model_executor.residual_weave`.
"""
