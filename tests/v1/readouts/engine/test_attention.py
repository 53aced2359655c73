# SPDX-License-Identifier: Apache-2.0
"""Attention patterns and attribution equal those of the Transformers library."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.parity.substitutes import EXACT_GELU
from tests.support import models
from tests.support.captured import CapturedEngine, Keeper, prompt
from vllm import RequestOutput, SamplingParams
from vllm.v1.readouts.results import ReadoutResult

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WORDS, LAYERS, CONTEXT = 1280, 2, 4352
SIZES = models.SIZES | {
    "vocab_size": WORDS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
WINDOW = 24
KINDS: dict[str, Any] = {
    "grouped heads, norms of q and k": lambda: transformers.Qwen3Config(**SIZES),
    "soft cap, window": lambda: transformers.Gemma2Config(
        **SIZES, sliding_window=WINDOW, query_pre_attn_scalar=32
    ),
    "sinks, window": lambda: transformers.GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "alibi": lambda: transformers.BloomConfig(
        vocab_size=WORDS, hidden_size=128, n_layer=LAYERS, n_head=4
    ),
    "parallel block, biases": lambda: transformers.GPTJConfig(
        vocab_size=WORDS,
        n_embd=128,
        n_layer=LAYERS,
        n_head=4,
        n_positions=256,
        rotary_dim=16,
        tie_word_embeddings=False,
    ),
    "multipliers": lambda: transformers.GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    ),
}
PROMPTS = [prompt(70, 1), prompt(7, 2), prompt(33, 3)]
"""The first takes several steps, beside the others."""
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
EVERYWHERE = {"kind": "attention", "positions": "all", "top_k": 64}


class Pair:
    """An engine whose prompts take 32 tokens per step, and the library's model."""

    def __init__(self, kind: str, folder: Any) -> None:
        self.kind = kind
        torch.manual_seed(0)
        model = models.save(KINDS[kind](), folder)
        self.library = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        if kind == "alibi":
            EXACT_GELU.apply(self.library)
        self.engine = CapturedEngine(
            model,
            reference=self.library,
            keeper=Keeper(),
            skip_tokenizer_init=True,
            max_model_len=CONTEXT if kind.startswith("grouped") else 256,
            max_num_batched_tokens=32,
            enable_readouts=True,
            enable_steering=True,
            hook_points=["q", "z", "attn_add"],
        )

    @property
    def has_biases(self) -> bool:
        """Whether the output projections add something that is no head's."""
        return self.kind in ("sinks, window", "alibi")

    def ask(self, prompts: list[list[int]], **specs: Any) -> list[RequestOutput]:
        params = SamplingParams(
            max_tokens=8, readouts=specs or None, detokenize=False, **GREEDY
        )
        return self.engine.run(prompts, params)

    def logits(self, output: RequestOutput) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Of all tokens that are fed: logits `[n, tokens]` and the stream by layer."""
        fed = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:-1]
        states: list[torch.Tensor] = []
        hooks = [
            *(one.register_forward_pre_hook(keep_input(states)) for one in self.layers),
            self.norm.register_forward_pre_hook(keep_input(states)),
        ]
        with torch.no_grad():
            logits = self.library(torch.tensor([fed])).logits[0][:, TOKENS].double()
        for one in hooks:
            one.remove()
        if cap := getattr(self.library.config, "final_logit_softcapping", None):
            logits = cap * torch.atanh(logits / cap)
        return logits.float(), states

    @property
    def layers(self) -> Any:
        inner = getattr(self.library, "model", None) or self.library.transformer
        return inner.layers if hasattr(inner, "layers") else inner.h

    @property
    def norm(self) -> Any:
        inner = getattr(self.library, "model", None) or self.library.transformer
        return inner.norm if hasattr(inner, "norm") else inner.ln_f

    def explained(self, part: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """What a part `[n, H]` of the last rows adds to the logits: a derivative.

        The norm is linear at a fixed scale: by how much it changes along the part, with
        the part that changes the scale taken out.
        """
        norm, config = self.norm, self.library.config
        centered = isinstance(norm, torch.nn.LayerNorm)
        rows = part - part.mean(-1, keepdim=True) if centered else part
        whole = last - last.mean(-1, keepdim=True) if centered else last
        eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", 0.0)
        scale = (whole.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
        weight = norm.weight + 1 if "gemma" in config.model_type else norm.weight
        head = self.library.get_output_embeddings().weight[TOKENS]
        factor = 1 / getattr(config, "logits_scaling", 1.0)
        return (rows * scale * weight @ head.T * factor).detach()

    def parts_of_heads(self, output: RequestOutput, layer: int) -> torch.Tensor:
        """What each head adds to the logits, `[n, heads, tokens]`, by modules' weights.

        Each head goes through its slice of the output projection, then through what
        follows it, with the scale that a norm has for all heads together.
        """
        fed = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:-1]
        block, config = self.layers[layer], self.library.config
        names = ("o_proj", "out_proj", "dense")
        (projection,) = [
            one for at, one in block.named_modules() if at.rpartition(".")[2] in names
        ]
        seen: list[torch.Tensor] = []
        hooks = [
            projection.register_forward_pre_hook(keep_input(seen)),
            self.norm.register_forward_pre_hook(keep_input(seen)),
        ]
        with torch.no_grad():
            self.library(torch.tensor([fed]))
        for one in hooks:
            one.remove()
        z, last = seen
        heads = config.num_attention_heads
        size = z.shape[1] // heads
        by_head = torch.zeros(heads, *z.shape)
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            by_head[head, :, own] = z[:, own]
        outputs = by_head @ projection.weight.T
        if hasattr(block, "post_feedforward_layernorm"):
            norm = block.post_attention_layernorm
            whole = projection(z)
            scale = (whole.pow(2).mean(-1, keepdim=True) + norm.eps).rsqrt()
            outputs = outputs * scale * (1 + norm.weight)
        outputs = outputs * getattr(config, "residual_multiplier", 1.0)
        return torch.stack([self.explained(one, last) for one in outputs], 1).detach()

    def patterns(self, output: RequestOutput) -> torch.Tensor:
        """Of all tokens that are fed: `[layers, heads, n, n]`."""
        fed = [*(output.prompt_token_ids or ()), *output.outputs[0].token_ids][:-1]
        with torch.no_grad():
            found = self.library(torch.tensor([fed]), output_attentions=True)
        return torch.stack([one[0].float() for one in found.attentions])


def keep_input(states: list[torch.Tensor]) -> Any:
    def hook(module: Any, args: Any, kwargs: Any = None) -> None:
        states.append(args[0][0])

    return hook


SOAKED = {"parallel block, biases", "multipliers"}
"""Kinds that are like others for attention: each takes an engine of its own."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=pytest.mark.soak if kind in SOAKED else ())
        for kind in KINDS
    ],
)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    opened = Pair(request.param, tmp_path_factory.mktemp("model"))
    yield opened
    opened.engine.close()


def dense(result: ReadoutResult, layer: int = 0) -> torch.Tensor:
    """Weights `[heads, n, n]` of a result with every key among the largest."""
    weights, keys = result["weights"][:, layer], result["keys"][:, layer]
    n, heads, _ = weights.shape
    found = torch.zeros(n, heads, n + 1)  # The last column is that of no key.
    where = torch.from_numpy(np.where(keys < 0, n, keys)).long()
    found.scatter_(2, where, torch.from_numpy(weights.copy()))
    assert not found[..., n].any()
    return found[..., :n].transpose(0, 1)


def check(found: Any, expected: torch.Tensor) -> None:
    values = torch.from_numpy(found) if isinstance(found, np.ndarray) else found
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


def test_patterns_of_a_mixed_batch_in_chunks_and_decodes(pair: Pair) -> None:
    full = {"kind": "attention", "positions": "all", "layers": [1], "full": True}
    for output in pair.ask(PROMPTS, full=full, top=EVERYWHERE):
        expected = pair.patterns(output)
        result = output.readouts["full"]
        assert result.taps == ((1, "q"),)
        check(result["weights"], expected[1])
        if "sinks" not in pair.kind:
            check(result["weights"].sum(-1), torch.ones(4, len(result.positions)))
        top = output.readouts["top"]
        assert top["weights"].shape == (len(top.positions), LAYERS, 4, 64)
        largest = expected.topk(min(64, expected.shape[-1]), dim=-1).values
        found = torch.from_numpy(top["weights"]).permute(1, 2, 0, 3)
        check(found[..., : largest.shape[-1]], largest)
        if expected.shape[-1] <= 64:
            check(dense(top, 1), expected[1])


def test_heads_keys_and_positions_are_chosen(pair: Pair) -> None:
    spec = {
        "kind": "attention",
        "layers": [0],
        "heads": [3, 1],
        "keys": [0, 5, 39],
        "positions": [4, 20, 31, 32],
    }
    (output,) = pair.ask([PROMPTS[2]], some=spec)
    expected = pair.patterns(output)[0][[3, 1]]
    padded = torch.nn.functional.pad(expected, (0, 1))
    found = output.readouts["some"]
    assert found.positions == [4, 20, 31, 32] and found.taps == ((0, "q"),)
    wanted = padded[:, found.positions][..., [0, 5, 39]]
    check(found["weights"][:, 0], wanted.transpose(0, 1))


def test_keys_that_another_request_has_cached(pair: Pair) -> None:
    start = prompt(64, 9)
    first, second = start + prompt(6, 10), start + prompt(9, 11)
    pair.ask([first])
    spec = {"kind": "attention", "layers": [1], "full": True, "positions": {"last": 5}}
    (output,) = pair.ask([second], tail=spec)
    assert output.num_cached_tokens == 64
    found = output.readouts["tail"]
    wanted = pair.patterns(output)[1][:, found.positions, : len(second)]
    check(found["weights"], wanted)


def test_a_prompt_of_4096_tokens(pair: Pair) -> None:
    if not pair.kind.startswith("grouped"):
        pytest.skip("one architecture is enough, and has the positions")
    long = prompt(4096, 5)
    spec = {"kind": "attention", "layers": [1], "positions": "all_prompt", "top_k": 4}
    (output,) = pair.ask([long], top=spec)
    expected = pair.patterns(output)[1][:, :4096]
    found = output.readouts["top"]
    largest = expected.topk(4, dim=-1).values.transpose(0, 1)
    check(found["weights"][:, 0], largest)


TOKENS = [7, 100, 1279]


def test_components_sum_to_the_logit(pair: Pair) -> None:
    spec = {"kind": "attribution", "tokens": TOKENS, "positions": "all"}
    for output in pair.ask(PROMPTS, why=spec):
        found = output.readouts["why"]
        added = [(n, name) for n in range(LAYERS) for name in ("attn_add", "mlp_add")]
        assert found.taps == ((0, "embed"), *added, (LAYERS - 1, "rest"))
        parts = torch.from_numpy(found["logits"].copy())
        logits, states = pair.logits(output)
        bound = 1e-4 * float(logits.abs().max())
        within(parts.sum(1), logits, bound)
        # By the definition: the final norm's scale is that of the last row.
        for layer in range(LAYERS):
            change = pair.explained(states[layer + 1] - states[layer], states[-1])
            within(parts[:, 1 + 2 * layer : 3 + 2 * layer].sum(1), change, bound)
        within(parts[:, 0], pair.explained(states[0], states[-1]), bound)
        if "bias" not in pair.kind and pair.kind != "alibi":
            assert parts[:, -1].abs().max() < bound


def test_components_follow_the_final_norm_when_other_weights_are_loaded(
    pair: Pair,
) -> None:
    (head,) = pair.engine.llm.collective_rpc(
        lambda worker: worker.model_runner.residual.readouts.head
    )
    for factor in (1.5, 1 / 1.5):
        for norm in (head.norm, pair.norm):
            norm.weight.data.mul_(factor)
        test_components_sum_to_the_logit(pair)


def test_heads_sum_to_what_attention_adds(pair: Pair) -> None:
    spec = {"kind": "attribution", "tokens": TOKENS, "positions": "all"}
    some = {**spec, "heads": [2, 0], "layers": [1]}
    asked = {"whole": spec, "heads": {**spec, "heads": "all"}, "some": some}
    for output in pair.ask(PROMPTS, **asked):
        whole, heads, few = (output.readouts[name] for name in asked)
        assert heads.error is None
        names = [f"head_{n}" for n in range(4)]
        assert heads.taps[1:6] == tuple((0, n) for n in (*names, "attn_rest"))
        assert few.taps[1:] == tuple(
            (1, name) for name in ("head_2", "head_0", "attn_rest", "mlp_add", "rest")
        )
        bound = 1e-4 * float(np.abs(whole["logits"]).max())
        np.testing.assert_allclose(
            heads["logits"].sum(1), whole["logits"].sum(1), atol=10 * bound
        )
        for layer in range(LAYERS):
            at = [n for n, tap in enumerate(heads.taps) if tap[0] == layer]
            at = [n for n in at if heads.taps[n][1].startswith(("head", "attn"))]
            parts = torch.from_numpy(heads["logits"][:, at])
            added = torch.from_numpy(whole["logits"][:, 1 + 2 * layer].copy())
            within(parts.sum(1), added, bound)
            expected = pair.parts_of_heads(output, layer)
            within(parts[:, :4], expected, bound)
            if not pair.has_biases:
                assert parts[:, 4].abs().max() < bound
        own = torch.from_numpy(few["logits"][:, 1:3].copy())
        within(own, pair.parts_of_heads(output, 1)[:, [2, 0]], bound)


def test_a_request_that_changes_heads_lacks_its_own_parts_alone(pair: Pair) -> None:
    """Whether or not it is known yet what follows the heads of the layer."""
    spec = {"kind": "attribution", "tokens": TOKENS, "heads": "all", "positions": [2]}
    plain = SamplingParams(max_tokens=1, readouts={"a": spec}, detokenize=False)
    changed = plain.clone()
    changed.steering_vectors = {"z": {1: {"op": "replace", "vector": 0, "heads": [0]}}}
    (parts,) = pair.engine.llm.collective_rpc(
        lambda worker: worker.model_runner.residual.readouts._heads
    )
    parts._layers[1].form = None
    for is_known in (False, True):
        first, other = pair.engine.run([PROMPTS[1]] * 2, [changed, plain])
        assert other.readouts["a"].error is None
        assert not np.isnan(other.readouts["a"]["logits"]).any()
        found = first.readouts["a"]
        assert is_known == (found.error is None), found.error
        if is_known:
            heads = [tap[1].startswith("head_") for tap in found.taps]
            missing = np.isnan(found["logits"][0, heads]).all(-1)
            assert missing.tolist() == [False] * 4 + [True] * 4


def within(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    torch.testing.assert_close(found, expected, atol=bound, rtol=0)


def test_some_layers_leave_the_others_in_the_rest(pair: Pair) -> None:
    specs = {
        "all": {"kind": "attribution", "tokens": TOKENS, "positions": [6]},
        "one": {
            "kind": "attribution",
            "tokens": [100],
            "positions": [6],
            "layers": [1],
        },
    }
    (output,) = pair.ask([PROMPTS[1]], **specs)
    whole, some = (output.readouts[name] for name in specs)
    assert some.taps == ((0, "embed"), (1, "attn_add"), (1, "mlp_add"), (1, "rest"))
    parts = whole["logits"][:, :, 1:2]
    np.testing.assert_allclose(some["logits"][:, 1:3], parts[:, 3:5], atol=1e-4)
    rest = parts[:, 1:3].sum(1) + parts[:, -1]
    np.testing.assert_allclose(some["logits"][:, -1], rest, atol=1e-4)
