# SPDX-License-Identifier: Apache-2.0
"""The dispatch thread of a worker: from staged rows to each request's chunks."""
