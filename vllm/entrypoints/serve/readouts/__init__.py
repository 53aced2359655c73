# SPDX-License-Identifier: Apache-2.0
"""Routes of readouts and sparse autoencoders."""
