# SPDX-License-Identifier: Apache-2.0
"""`/v1/steering`: what steers every request, and named vectors."""
