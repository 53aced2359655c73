# SPDX-License-Identifier: Apache-2.0
"""The page about SAELens runs as it is: an SAE trains."""

from pathlib import Path

import pytest

pytest.importorskip("sae_lens", reason="make test-interop")

from tests.interop.pages import code_of, printed_by

pytestmark = pytest.mark.interop


def test_an_sae_trains(tmp_path: Path) -> None:
    served, trained, cached = code_of("saelens")
    check = "\n    print('trained', tuple(sae.W_enc.shape))\n"
    printed = printed_by(tmp_path, f"{served}\n{trained}{check}")
    assert "torch.Size([1, " in printed and "trained (192, 256)" in printed
    assert "use_cached_activations=True" in cached
