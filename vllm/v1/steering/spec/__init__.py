# SPDX-License-Identifier: Apache-2.0
"""Parsing and checks of what users write: vectors, entries, files and provenance."""
