# SPDX-License-Identifier: Apache-2.0
"""Thin adapters for scripts that were written for other libraries.

There is one package or module per library. Each translates the library's calls to
capture and steering requests, imports what it adapts lazily, and costs nothing unless
it is imported.
"""
