# SPDX-License-Identifier: Apache-2.0
"""Random requests of every kind, and the comparison of their responses."""

import base64
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.hostile.mutations import WIDTH

HOOKS = ("pre_attn", "post_attn", "post_block")
LAYERS = 3
MAX_LEN = 256
TIERS = ("steering_vectors", "prefill_steering_vectors", "decode_steering_vectors")
STOPS = (" the", "e", "ing", ". ", "qu", "\n")


@dataclass(frozen=True)
class Ask:
    """A request; its client disconnects after chunk `hang_up` of its stream."""

    body: dict[str, Any]
    hang_up: int | None


@dataclass
class Seen:
    """The content that one request has received."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    rows: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Rows by sample, layer, hook and positions."""

    def take(self, part: dict[str, Any]) -> None:
        """Add a response or a chunk of one."""
        for choice in part.get("choices", ()):
            at = choice["index"]
            self.texts[at] = self.texts.get(at, "") + choice["text"]
            found = choice.get("logprobs") or {}
            self.logprobs.setdefault(at, []).extend(found.get("token_logprobs", ()))
            if choice.get("finish_reason"):
                self.reasons[at] = choice["finish_reason"]
        told = (part.get("capture_results") or {}).get("inline")
        if told is not None and told["status"] != "pending":
            assert told["status"] == "ok", told
            self.rows = dict(_rows(told["payload"]))


def requests(seed: int, count: int) -> list[Ask]:
    """Random requests, determined by the seed."""
    chance = random.Random(seed)
    # Longer than a block of the KV cache, so that blocks are shared.
    prefixes = [_tokens(chance, 140) for _ in range(4)]
    return [_ask(chance, prefixes) for _ in range(count)]


def difference(found: Seen, alone: Seen, aborted: bool) -> float:
    """The largest deviation of a request's output and rows from its result alone.

    Deviations are relative to the norm of each row, and to 1 for log-probabilities.

    Raises:
        AssertionError: a text or a set of rows differs.

    """
    worst = 0.0
    for at, text in found.texts.items():
        whole = alone.texts[at]
        assert whole.startswith(text) if aborted else whole == text
        ours, theirs = found.logprobs[at], alone.logprobs[at]
        assert aborted or len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=not aborted):
            worst = max(worst, abs(one - other) / max(1.0, abs(other)))
    if aborted:
        return worst
    assert found.reasons == alone.reasons
    assert found.rows.keys() == alone.rows.keys()
    for name, rows in found.rows.items():
        norms = np.linalg.norm(alone.rows[name], axis=1)
        apart = np.linalg.norm(rows - alone.rows[name], axis=1)
        worst = max(worst, float((apart / np.maximum(norms, 1e-6)).max(initial=0)))
    return worst


def _ask(chance: random.Random, prefixes: list[list[int]]) -> Ask:
    shared = chance.choice(prefixes) if chance.random() < 0.5 else []
    prompt = shared + _tokens(chance, chance.randint(1, 60))
    max_tokens = chance.randint(1, 16)
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "temperature": 0.0,
        "stream": chance.random() < 0.5,
        "ignore_eos": chance.random() < 0.5,
    }
    body["n"] = chance.choice((1, 1, 1, 2, 3))
    if body["n"] > 1 or chance.random() < 0.2:
        body |= {"temperature": 0.8, "seed": chance.randrange(1 << 30)}
    if chance.random() < 0.3:
        body["stop"] = chance.sample(STOPS, chance.randint(1, 3))
    if chance.random() < 0.6:
        body["capture"] = {"inline": _capture(chance, len(prompt))}
    for tier in chance.sample(TIERS, chance.choice((0, 0, 1, 1, 2))):
        body[tier] = _steering(chance, len(prompt), tier)
    leaves = body["stream"] and chance.random() < 0.3
    return Ask(body, chance.randint(1, max_tokens) if leaves else None)


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, 1200) for _ in range(count)]


def _capture(chance: random.Random, size: int) -> dict[str, Any]:
    hooks = {
        hook: chance.choice(("all", sorted(chance.sample(range(LAYERS), 2))))
        for hook in chance.sample(HOOKS, chance.randint(1, 3))
    }
    positions = chance.choice(
        (
            *("last_prompt", "all_generated", "all_generated", "all_prompt", "all"),
            sorted(chance.sample(range(size), min(size, 5))),
        )
    )
    return {"hooks": hooks, "positions": positions}


def _steering(chance: random.Random, size: int, tier: str) -> dict[str, Any]:
    places = [(hook, layer) for hook in HOOKS for layer in range(LAYERS)]
    spec: dict[str, Any] = {}
    for hook, layer in chance.sample(places, chance.randint(1, 3)):
        entries = [_entry(chance, size, tier) for _ in range(chance.choice((1, 1, 2)))]
        spec.setdefault(hook, {})[str(layer)] = entries
    return spec


def _entry(chance: random.Random, size: int, tier: str) -> dict[str, Any]:
    entry = _operation(chance)
    if tier != "decode_steering_vectors" and chance.random() < 0.4:
        entry["positions"] = chance.choice(
            ([0], [-1], {"last": 3}, {"ranges": [[0, size // 2]]}, "all_prompt")
        )
    return entry


def _operation(chance: random.Random) -> dict[str, Any]:
    """A random operation that needs nothing on the server."""

    def vector() -> list[float]:
        return [round(chance.gauss(0, 1), 3) for _ in range(WIDTH)]

    scale = round(chance.uniform(-0.8, 0.8), 2)
    rank = chance.randint(1, 3)
    read, write = ([vector() for _ in range(rank)] for _ in range(2))
    f = chance.choice(("identity", "relu", "step"))
    return chance.choice(
        [
            {"vector": vector(), "scale": scale},
            {"vector": vector(), "scale": scale / 4, "norm_match": True},
            {"vector": vector(), "op": "project_out", "scale": scale},
            {"vector": vector(), "op": "clamp", "min": -1, "max": 1},
            {"vector": vector(), "op": "clamp", "value": 0.5, "strength": 0.5},
            {"vector": vector(), "op": "swap", "target": vector()},
            {"op": "rotate", "plane": [vector(), vector()], "degrees": 40},
            {"vector": vector(), "op": "replace", "alpha": 0.3},
            {"op": "low_rank", "read": read, "write": write, "activation": f,
             "scale": 0.01},
        ]
    )  # fmt: skip


def _rows(
    payload: Any, sample: str = "0"
) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    if isinstance(payload, dict):
        for index, part in payload.items():
            yield from _rows(part, index)
        return
    for item in payload:
        rows = np.frombuffer(base64.b64decode(item["data"]), np.float32)
        where = f"{sample} {item['layer']} {item['hook']} {item['positions']}"
        yield where, rows.reshape(item["shape"])
