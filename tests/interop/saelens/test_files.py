# SPDX-License-Identifier: Apache-2.0
"""Files that SAELens wrote, compared with its own results."""

from pathlib import Path

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

import torch

from tests.interop.saelens.saelens_reference import ARCHITECTURES, main
from vllm.steering.sae import decode, encode, load_sae

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("saelens")
    main(out)
    return out


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_activations_and_reconstructions_are_saelens_own(
    saved: Path, name: str
) -> None:
    sae = load_sae(saved / name)
    reference = torch.load(saved / name / "reference.pt")
    found = encode(sae, reference["rows"])
    assert torch.equal(found != 0, reference["activations"] != 0)
    torch.testing.assert_close(found, reference["activations"], atol=1e-5, rtol=1e-5)
    restored = decode(sae, found, reference["rows"])
    torch.testing.assert_close(restored, reference["restored"], atol=1e-4, rtol=1e-4)
