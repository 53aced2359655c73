# SPDX-License-Identifier: Apache-2.0
"""A lens whose logits are computed in the order of the passes, and the rest beside."""

import pytest
import torch
from torch import nn

from vllm.v1.readouts.worker import worker
from vllm.v1.readouts.worker.head import Head

pytestmark = pytest.mark.gpu

WIDTH, VOCABULARY, ROWS, TOP = 512, 32000, 96, 5
TOKENS = (3, 31999)


class Model(nn.Module):
    """Layers, a norm and an unembedding, as models of upstream have them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.model.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def compute_logits(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(rows)
        return found


@pytest.mark.parametrize("at_once", [ROWS, 7])
@torch.inference_mode()
def test_its_memory_is_not_used_again_too_early(at_once: int) -> None:
    torch.manual_seed(0)
    model = Model().cuda().bfloat16()
    head = Head(model, model.model.layers[0], VOCABULARY, "cuda")
    head._rows_at_once = at_once
    main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
    waits = []
    for _ in range(40):
        rows = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        logs = model.compute_logits(model.model.norm(rows)).float().log_softmax(-1)
        expected = logs.topk(TOP).values.cpu(), logs[:, list(TOKENS)].cpu()
        rows.record_stream(beside)
        beside.wait_stream(main)
        head.pass_stream = main
        with torch.cuda.stream(beside):
            torch.cuda._sleep(2_000_000)  # It falls behind the passes.
            found = head.lens_values(rows, TOP, TOKENS)
            host = {name: worker._to_host(one) for name, one in found.items()}
            done = torch.cuda.Event()
            done.record()
        del rows, logs, found
        # The next pass writes into all memory that is free.
        for shape in ((ROWS, VOCABULARY), (ROWS, WIDTH), (ROWS, TOP), (at_once, 2)):
            torch.full(shape, torch.nan, device="cuda")
            torch.full(shape, torch.nan, device="cuda", dtype=torch.bfloat16)
        waits.append((done, host, expected))
    for done, host, (best, chosen) in waits:
        done.synchronize()
        torch.testing.assert_close(host["logprobs"], best, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(host["token_logprobs"], chosen, rtol=2e-2, atol=2e-2)
