# SPDX-License-Identifier: Apache-2.0
"""The hook points of upstream's model architectures."""
