# SPDX-License-Identifier: Apache-2.0
"""A thread and a bounded queue per consumer instance."""
