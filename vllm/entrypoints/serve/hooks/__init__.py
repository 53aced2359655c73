# SPDX-License-Identifier: Apache-2.0
"""The routes under `/v1/hooks`."""
