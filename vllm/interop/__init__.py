# SPDX-License-Identifier: Apache-2.0
"""Thin adapters for scripts that were written for other systems.

A package per system. Each translates its system's calls to capture and steering as
requests have them, imports what it adapts lazily, and costs nothing unless imported.
"""
