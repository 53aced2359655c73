# SPDX-License-Identifier: Apache-2.0
import torch

from vllm.v1.worker.residual_worker import JOINED, join, part


def test_tensors_are_what_they_were_before_they_were_joined() -> None:
    tensors = {
        "hidden": torch.randn(3, 4),
        "rows": torch.randn(5, 7).to(torch.bfloat16),
        "none": torch.empty(0, 4, dtype=torch.float64),
        "bytes": torch.arange(13, dtype=torch.uint8),
        "one": torch.tensor(3, dtype=torch.int64),
        "turned": torch.randn(2, 6).T,
    }
    sent = join(tensors, ["hidden"])
    assert list(sent) == ["hidden", JOINED] and sent["hidden"] is tensors["hidden"]
    part(sent)
    assert list(sent) == list(tensors)
    for name, expected in tensors.items():
        assert sent[name].dtype == expected.dtype
        assert torch.equal(sent[name], expected), name


def test_other_messages_stay_as_they_are() -> None:
    tensors = {"hidden": torch.randn(3, 4)}
    part(tensors)
    assert list(tensors) == ["hidden"]
