# SPDX-License-Identifier: Apache-2.0
"""A causal network in NumPy that answers the requests of a sweep, and its engine."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.patching.engine import Engine
from vllm.patching.grid import Facts
from vllm.patching.planning import Sweep, plan_of
from vllm.patching.questions import Ask, Reply
from vllm.patching.study import Study
from vllm.v1.capture.consumers.memory.api import kept_run
from vllm.v1.capture.consumers.memory.patch_source import PatchSourceConsumer

LAYERS, WIDTH, VOCABULARY, LONGEST = 3, 4, 12, 16
HOOKS = ("pre_attn", "post_attn", "post_block")


class Toy:
    """A model with attention to all earlier tokens alike, and what it keeps."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.embeddings = random.standard_normal((VOCABULARY, WIDTH))
        self.places = random.standard_normal((LONGEST, WIDTH))
        self.mixing = random.standard_normal((LAYERS, WIDTH, WIDTH))
        self.mlps = random.standard_normal((LAYERS, WIDTH, WIDTH))
        self.head = random.standard_normal((WIDTH, VOCABULARY))
        self.consumer = PatchSourceConsumer(None, {})
        self.consumer.instance_name = "patch_source"
        self.capture: Any = SimpleNamespace(
            consumers=lambda: {"patch_source": self.consumer}
        )
        self.asked: list[Ask] = []
        self.checked: list[Any] = []

    @property
    def engine(self) -> Engine:
        points = dict.fromkeys(range(LAYERS), HOOKS)
        keeper = "patch_source", "run"
        facts = Facts(points, {}, LONGEST, VOCABULARY, 5, keeper)
        return Engine(facts, None, self.capture, self.checked.append)

    def run(self, token_ids: Any, steering: Any = None) -> tuple[dict[Any, Any], Any]:
        """The rows of all taps before they are changed, and the log-probabilities."""
        rows: dict[Any, Any] = {}

        def at(layer: int, hook: str, x: Any) -> Any:
            rows[layer, hook] = x.copy()
            entries = (steering or {}).get(hook, {}).get(layer, ())
            for entry in entries:
                x = self._replaced(x, entry, (layer, hook))
            return x

        count = len(token_ids)
        x = self.embeddings[list(token_ids)] + self.places[:count]
        sees = np.tril(np.ones((count, count)))
        sees /= sees.sum(axis=1, keepdims=True)
        for layer in range(LAYERS):
            x = at(layer, "pre_attn", x)
            x = at(layer, "post_attn", x + sees @ np.tanh(x @ self.mixing[layer]))
            x = at(layer, "post_block", x + np.tanh(x @ self.mlps[layer]))
        logits = x[-1] @ self.head
        return rows, logits - np.log(np.exp(logits).sum())

    def _replaced(self, x: Any, entry: Mapping[str, Any], tap: Any) -> Any:
        positions, alpha = entry["positions"], entry.get("alpha", 1.0)
        if entry.get("from") == "zeros":
            new = np.zeros((1, WIDTH))
        elif "from" in entry:
            run = kept_run(self.capture, entry["from"]["run"])
            kept = run.rows.positions[tap]
            chosen = [kept.index(p) for p in entry["from"]["positions"]]
            new = run.rows[tap].double().numpy()[chosen]
        else:
            new = np.atleast_2d(entry.get("vectors", entry.get("vector")))
        x = x.copy()
        x[positions] = (1 - alpha) * x[positions] + alpha * new
        return x

    def answer(self, ask: Ask) -> Reply:
        """The reply to a request; keeps its rows if it asks for that."""
        self.asked.append(ask)
        rows, logprobs = self.run(ask.token_ids, ask.steering)
        if ask.capture is not None:
            self._keep(ask, rows)
        wanted = ask.tokens or np.argsort(-logprobs)[: ask.top].tolist()
        return Reply({token: float(logprobs[token]) for token in wanted})

    def _keep(self, ask: Ask, rows: dict[Any, Any]) -> None:
        assert ask.capture is not None
        spec = ask.capture["patch_source"]
        count = len(ask.token_ids)
        positions = spec["positions"]
        positions = list(range(count)) if positions == "all_prompt" else positions
        taps = [(n, hook) for hook, layers in spec["hooks"].items() for n in layers]
        kept = torch.tensor(np.stack([rows[tap][positions] for tap in taps]))
        sidecar = {
            "vllm_internal_request_id": "r",
            "client_request_id": "r",
            "sample_index": 0,
            "num_prompt_tokens": count,
            "positions": positions,
            "token_ids": [ask.token_ids[p] for p in positions],
        }
        self.consumer.store.put(spec["run"], taps, kept, sidecar)

    def sweep(self, **asked: Any) -> Study:
        """Run a sweep to its end, its requests in another order than they are made."""
        study = Study(plan_of(Sweep(**asked), self.engine))
        for asks in study.rounds():
            study.replies = [self.answer(ask) for ask in asks]
        for number in reversed(range(len(study.asks))):
            list(study.take(number, self.answer(study.asks[number])))
        return study
