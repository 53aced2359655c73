# SPDX-License-Identifier: Apache-2.0
"""HTTP routes for hook functions, `/v1/hooks/...`."""
