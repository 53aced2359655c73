# SPDX-License-Identifier: Apache-2.0
"""The kernel for the likeliest tokens against PyTorch: on a GPU, or interpreted."""

import pytest
import torch

from vllm.triton_utils import HAS_TRITON
from vllm.v1.readouts.worker.top_tokens import lens_arrays, top_tokens

pytestmark = [
    pytest.mark.usefixtures("no_engine"),
    pytest.mark.skipif(not HAS_TRITON, reason="neither a GPU nor the interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("vocabulary", "top_k"), [(37, 1), (4097, 7)])
def test_tokens_and_log_probabilities_are_those_of_pytorch(
    dtype: torch.dtype, vocabulary: int, top_k: int
) -> None:
    draw = torch.Generator().manual_seed(vocabulary)
    rows = torch.randn(6, vocabulary + 3, generator=draw)
    rows[1, ::5] = -torch.inf
    rows[2] = torch.randint(3, rows[2].shape, generator=draw) - 1.0
    rows[2, 7] = -0.0
    rows[3, 5] = torch.nan
    rows[4] = -torch.inf  # All but two, so that equal ones are among the largest.
    rows[4, [3, 9]] = 1.0
    logits = rows.to(DEVICE, dtype)[:, :vocabulary]  # The head pads its rows.
    asked = torch.tensor([0, vocabulary - 1, 5], device=DEVICE)
    best = top_tokens(logits, top_k, asked, first=1000)[None].cpu().numpy()
    arrays = [torch.from_numpy(one) for one in lens_arrays(best, top_k).values()]
    found, logprobs, of_asked = (one.to(DEVICE) for one in arrays)
    assert found.shape == (6, top_k)
    found = found - 1000
    ordered = logits.float().nan_to_num(nan=1e9, neginf=-1e9)
    ordered = ordered.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    assert torch.equal(found.long(), ordered)
    expected = logits.log_softmax(dim=-1, dtype=torch.float32)
    for own, index in ((logprobs, ordered), (of_asked, asked.expand(6, -1))):
        torch.testing.assert_close(
            own, expected.gather(1, index), rtol=1e-5, atol=1e-5, equal_nan=True
        )


def test_nothing_is_asked_of_rows() -> None:
    logits = torch.randn(3, 40, device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert top_tokens(logits, 2, nothing).shape == (3, 5)
    absent = torch.tensor([-1, 4], device=DEVICE)
    gone, asked, _ = top_tokens(logits[:1], 0, absent)[0].tolist()
    assert gone == -torch.inf and asked == logits[0, 4].item()
    assert top_tokens(logits[:0], 0, absent).shape == (0, 3)


def test_a_shard_without_a_number_counts_as_nothing() -> None:
    logits = torch.full((1, 40), -torch.inf, device=DEVICE)
    nothing = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert top_tokens(logits, 1, nothing)[0, -1].item() == -torch.inf
