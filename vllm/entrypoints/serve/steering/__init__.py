# SPDX-License-Identifier: Apache-2.0
"""`/v1/steering`: global vectors and named modules."""
