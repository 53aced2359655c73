# SPDX-License-Identifier: Apache-2.0
"""The cells of our nnbench backend, compared with hooks in Transformers.

nnbench's package `isb` is not on a registry, so the names that a backend uses have
stand-ins.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.nnbench import stand_ins
from tests.interop.streams import streams_of

pytestmark = pytest.mark.e2e

PROMPT, OTHER = "Anna went home.", "Peter ran away."
TARGET = 700


@pytest.fixture(scope="module")
def bench(model: Path) -> Iterator[SimpleNamespace]:
    modules = stand_ins.modules(TARGET)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        stand_ins.loaded("cells")
        backend = stand_ins.loaded("backend").ClearboxBackend(
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            gpu_memory_utilization=0.2,
        )
        opened = backend.load(str(model))
        backend.vanilla(opened, PROMPT, new_tokens=2)
        cells = modules["isb.methodologies.registry"].cells
        yield SimpleNamespace(model=opened, backend=backend, cells=cells)
        backend.teardown(opened)


def ids_of(bench, prompt: str) -> list[int]:
    return bench.model.tokenizer(prompt)["input_ids"]


def run(reference, ids: list[int], layer: int | None = None, change=None):
    """Logits `[tokens, vocabulary]` and layers' outputs; one may be changed."""

    def changed(at: int, output: torch.Tensor) -> torch.Tensor:
        return change(output) if at == layer else output

    logits, found = streams_of(reference, ids, changed)
    return logits[0], [one[0] for one in found]


def silenced(reference, ids: list[int], part: str, zeros) -> torch.Tensor:
    """Logits, where a part of layer 1 adds nothing."""
    module = reference.model.layers[1].get_submodule(part)
    handle = module.register_forward_hook(lambda _module, _inputs, out: zeros(out))
    try:
        return run(reference, ids)[0]
    finally:
        handle.remove()


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-4)


def test_the_lens_reads_every_layer(bench, reference) -> None:
    _, streams = run(reference, ids_of(bench, PROMPT))
    for layers, wanted in (("all", [0, 1, 2]), ([-1, 0], [2, 0])):
        found = bench.cells["logit_lens"](
            bench.backend, bench.model, [PROMPT], layers=layers
        )
        assert found.shape == (len(wanted), 1, 1280)
        with torch.no_grad():
            for row, layer in zip(found, wanted):
                normed = reference.model.norm(streams[layer][-1:])
                close(row, reference.lm_head(normed))


@pytest.mark.parametrize("scale_by", ["mean_norm", "token_norm"])
def test_steering_adds_the_targets_direction(bench, reference, scale_by) -> None:
    direction = reference.lm_head.weight[TARGET].detach()
    direction = direction / direction.norm()

    def change(h: torch.Tensor) -> torch.Tensor:
        norms = h.norm(dim=-1, keepdim=True)
        scale = norms.mean() if scale_by == "mean_norm" else norms
        return h + 0.5 * scale * direction

    logits, _ = run(reference, ids_of(bench, PROMPT), 1, change)
    options = {"layer": 1, "alpha": 0.5, "scale_by": scale_by}
    found = bench.cells["steering"](bench.backend, bench.model, [PROMPT], **options)
    close(found, logits[-1:])
    plain, _ = run(reference, ids_of(bench, PROMPT))
    found = bench.cells["steering"](bench.backend, bench.model, [PROMPT], alpha=0)
    close(found, plain[-1:])


def test_generated_tokens_are_steered_too(bench, reference) -> None:
    direction = reference.lm_head.weight[TARGET].detach()
    direction = direction / direction.norm()
    ids = ids_of(bench, PROMPT)
    count = len(ids)

    def change(h: torch.Tensor) -> torch.Tensor:
        norms = h.norm(dim=-1, keepdim=True)
        # The prompt takes one forward pass, each generated token another.
        scale = torch.cat(
            [
                norms[:, :count].mean(dim=1, keepdim=True).expand(-1, count, -1),
                norms[:, count:],
            ],
            dim=1,
        )
        return h + 0.5 * scale * direction

    found = bench.cells["gen_steering"](
        bench.backend, bench.model, [PROMPT], layer=1, alpha=0.5, new_tokens=4
    )
    assert found.shape == (4, 1280)
    tokens = [*ids, *found.argmax(-1).tolist()][:-1]
    logits, _ = run(reference, tokens, 1, change)
    close(found, logits[count - 1 :])


@pytest.mark.parametrize("positions", ["all", "last"])
def test_clean_rows_replace_corrupt_ones(bench, reference, positions) -> None:
    clean, corrupt = ids_of(bench, PROMPT), ids_of(bench, OTHER)
    size = min(len(clean), len(corrupt))
    texts = [bench.model.tokenizer.decode(one[-size:]) for one in (clean, corrupt)]
    clean, corrupt = (ids_of(bench, text) for text in texts)
    assert len(clean) == len(corrupt)
    _, streams = run(reference, clean)

    def change(h: torch.Tensor) -> torch.Tensor:
        at = slice(None) if positions == "all" else slice(-1, None)
        changed = h.clone()
        changed[0, at] = streams[1][at]
        return changed

    logits, _ = run(reference, corrupt, 1, change)
    patching = bench.cells["activation_patching"]
    found = patching(bench.backend, bench.model, texts, layer=1, positions=positions)
    close(found, logits[-1:])
    plain, _ = run(reference, corrupt)
    close(patching(bench.backend, bench.model, texts, patch=False), plain[-1:])


def test_a_sublayer_is_silenced(bench, reference) -> None:
    ids, ablation = ids_of(bench, PROMPT), bench.cells["ablation"]
    logits = silenced(reference, ids, "mlp", torch.zeros_like)
    close(ablation(bench.backend, bench.model, [PROMPT], layer=1), logits[-1:])
    logits = silenced(
        reference, ids, "self_attn", lambda out: (torch.zeros_like(out[0]), out[1])
    )
    found = ablation(bench.backend, bench.model, [PROMPT], layer=1, target="attn")
    close(found, logits[-1:])
    with pytest.raises(RuntimeError, match="are carried"):
        ablation(bench.backend, bench.model, [PROMPT], layer=1, target="norm")
