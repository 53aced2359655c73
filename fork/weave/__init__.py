# SPDX-License-Identifier: Apache-2.0
"""The weave that places hook points in upstream's decoder layers."""
