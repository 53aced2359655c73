# SPDX-License-Identifier: Apache-2.0
"""Hook points of the residual stream: what the ops at one of them do."""
