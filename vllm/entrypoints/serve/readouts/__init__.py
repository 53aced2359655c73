# SPDX-License-Identifier: Apache-2.0
"""Routes for readouts and sparse autoencoders."""
