# SPDX-License-Identifier: Apache-2.0
"""Compares what features have done in several processes with one process."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hf_reference import relative_error


def same_readouts(whole: dict[Any, Any], parts: dict[Any, Any]) -> None:
    """Compare the arrays of readouts, by name and label."""
    assert parts.keys() == whole.keys()
    for key, expected in whole.items():
        found = parts[key]
        assert found.shape == expected.shape and expected.size, key
        if key[1] in ("token_ids", "keys"):
            # Where they differ they are a tie: their values are compared.
            assert (found == expected).mean() > 0.9
            continue
        log = "logprobs" in key[1]
        np.testing.assert_allclose(found, expected, rtol=0 if log else 1e-3, atol=1e-3)


def same_receipt(whole: Any, parts: Any) -> None:
    """Compare what steered requests are told."""
    if whole is None:
        assert parts is None
        return
    assert list(parts["fired"].items()) == list(whole["fired"].items())
    for entry, expected in zip(parts["applied"], whole["applied"], strict=True):
        assert entry["dose"] == pytest.approx(expected["dose"], rel=1e-3)
        assert entry | {"dose": 0} == expected | {"dose": 0}


def same_hooks(whole: Any, parts: Any) -> None:
    """Compare the rows that hook functions have kept, by hook and layer."""
    one, other = kept_rows(whole), kept_rows(parts)
    assert other.keys() == one.keys()
    for key, rows in one.items():
        assert relative_error(other[key], rows.float()) < 1e-4, key


def kept_rows(results: Any) -> dict[Any, torch.Tensor]:
    """The rows of `hook_results`."""
    return {
        (name, layer): torch.cat(parts)
        for name, saved in (results or {}).items()
        for layer, parts in saved.items()
    }
