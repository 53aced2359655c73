# SPDX-License-Identifier: Apache-2.0
"""Mutated valid bodies: a changed place, a misspelt name, a flipped byte."""

import base64
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

WIDTH = 64

VECTOR = [0.25] * WIDTH
PACKED = {
    "dtype": "float32",
    "shape": [1, WIDTH],
    "layer_indices": [1],
    "data": base64.b64encode(np.full(WIDTH, 0.5, np.float32).tobytes()).decode(),
    "scales": [0.5],
}
ENTRY = {"vector": VECTOR, "op": "clamp", "min": -1, "max": 1, "positions": [0, -1]}
VECTORS = {"post_block": {"1": ENTRY, "2": VECTOR}, "pre_attn": PACKED}
CAPTURE = {
    "inline": {
        "hooks": {"post_block": [0, 2]},
        "positions": "all",
        "transport": "http",
    },
    "filesystem": {
        "hooks": {"pre_attn": {"layers": [0], "ranges": [[1, 2]]}},
        "positions": [0, 1],
        "tag": "mutated",
        "layout": "packed",
    },
}
FIELDS = {
    "capture": CAPTURE,
    "capture_wait": True,
    "steering_vectors": VECTORS,
    "prefill_steering_vectors": {"post_attn": {"0": [ENTRY, {"vector": VECTOR}]}},
    "decode_steering_vectors": {
        "post_block": {"0": {"vector": VECTOR, "scale": 0.1, "positions": [3]}}
    },
}
CHAT_FIELDS = {key: FIELDS[key] for key in FIELDS if not key.startswith("decode")}
READOUTS = {
    "readouts": {
        "norms": {"kind": "norm", "hooks": {"post_block": [0, 1]}, "positions": "all"},
        "own": {
            "kind": "probe",
            "vectors": [VECTOR],
            "bias": [0.5],
            "layer": 1,
            "hook": "post_block",
            "activation": "sigmoid",
            "cosine": False,
        },
        "tokens": {"kind": "lens", "layers": [1], "top_k": 3, "tokens": [5, 6]},
        "mean": {
            "kind": "rows",
            "hooks": {"pre_attn": [2]},
            "reduce": "mean",
            "positions": "all_prompt",
        },
    },
    "stop_when": [{"readout": "own", "index": 0, "above": 2.0, "below": -1}],
}
SMALL = {"model": "tiny", "max_tokens": 2, "temperature": 0.0}
MESSAGES = [{"role": "user", "content": "a story"}]
NAMED = {"name": "mutated", "vectors": VECTORS, "metadata": {"origin": "here"}}

HOOKED = [{"fn": {"name": "none", "params": {"a": 1}}, "layer_indices": [0]}]
LENS = {
    "output_residual_stream": [0, 2],
    "apply_steering_vectors": json.dumps(
        [{"activations": [VECTOR], "layer_indices": [1], "scale": 2.0}]
    ),
}
GATE = {"post_block": {key: PACKED[key] for key in PACKED if key != "scales"}}
GATED = {
    "conversation_id": "mutated",
    "steering": [
        {
            "when": {
                "kind": "probe",
                "probe": {"kind": "inline", "packed": GATE},
                "threshold": 0.5,
                "sharpness": 1.0,
            },
            "scope": "this_token",
            "apply": {
                "kind": "add",
                "steer": {"kind": "inline", "packed": GATE},
                "strength": 1.0,
            },
        }
    ],
}
TOKENS = {"prompt_token_ids": [20, 30, 40]}
AT = "resid_post.1"
OPERATION = {"method": "additive", "vector": VECTOR, "scale": 1.0}
SITE = [{"point": "resid_post", "layers": {"1": [OPERATION]}}]
INTERP: dict[str, dict[str, Any]] = {
    "tokenize": {"messages": MESSAGES, "template_kwargs": {"a": 1}},
    "serves": {"points": [AT, "z.1"]},
    "capture": {**TOKENS, "points": ["resid_pre.1"], "rows": [0, 2], "steering": SITE},
    "project": {**TOKENS, "directions": [{"point": AT, "vectors": [VECTOR]}]},
    "lens": {**TOKENS, "lenses": [{"layers": [0, 2]}], "max_tokens": 2, "top_n": 3},
    "generate": {**TOKENS, "max_tokens": 2, "seed": 1, "top_k": 3, "steering": SITE},
    "unembed_rows": {"token_ids": [5, 6]},
    "decode_residuals": {"residuals": [VECTOR], "top_k": 3},
}

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**SMALL, "prompt": [20, 30, 40], **FIELDS}),
    ("/v1/chat/completions", {**SMALL, "messages": MESSAGES, **CHAT_FIELDS}),
    ("/invocations", {**SMALL, "prompt": [20, 30, 40], **FIELDS}),
    (
        "/inference/v1/generate",
        {"token_ids": [20, 30, 40], "sampling_params": {"max_tokens": 2, **FIELDS}},
    ),
    ("/v1/completions", {**SMALL, "prompt": [20, 30, 40], **READOUTS}),
    ("/v1/chat/completions", {**SMALL, "messages": MESSAGES, **READOUTS}),
    ("/v1/readouts/modules/register", {"name": "m", "path": "/none", "replace": True}),
    ("/v1/readouts/modules/unregister", {"name": "m"}),
    ("/v1/sae/register", {"name": "m", "path": "/none", "layer": 1}),
    ("/v1/completions", {**SMALL, "prompt": [20, 30, 40], "vllm_xargs": LENS}),
    ("/v1/completions", {**SMALL, "prompt": [20, 30, 40], **GATED}),
    (
        "/v1/completions",
        {
            **SMALL,
            "prompt": "a story",
            "vllm_xargs": {"apply_hooks": json.dumps(HOOKED)},
        },
    ),
    ("/v1/steering/vectors/register", {"name": "m", "kind": "steer", "packed": GATE}),
    ("/v1/steering/vectors/unregister", {"name": "m", "kind": "steer"}),
    ("/v1/hooks/register", {"hooks": HOOKED, "prefetch_params": ["lm_head.weight"]}),
    ("/v1/hooks/prefetch", {"params": ["lm_head.weight"]}),
    ("/v1/hooks/collect", {}),
    *((f"/v1/interp-engine/{route}", body) for route, body in INTERP.items()),
    ("/v1/steering/set", {"vectors": VECTORS, "replace": True}),
    ("/v1/steering/modules/register", {**NAMED, "replace": True}),
    ("/v1/steering/modules/unregister", {"name": "mutated"}),
]
"""Routes with valid bodies."""

NAMES = (
    *("vectors", "steering_vectors", "capture", "hooks", "positions", "post_block"),
    *("data", "shape", "vector", "layers", "ranges", "last", "0", "-1", "patch"),
)
ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 0.5, -0.0, 2**31, -(2**63), 10**40, 10**70),
    *(1e39, 1e308, float("nan"), float("inf"), "", "x", "all", "last_prompt", "../.."),
    *("/etc/passwd", "\x00", "\ud800", "é" * 300, "NaN", "1" * 5000, [], {}),
)


MOST_BYTES = 80 << 20
"""Approximate size; larger than a server accepts, so that too large bodies occur."""
DEEPEST = 950
"""Nesting that `json` writes."""


def mutations(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Yield routes and mutated bodies, determined by the seed."""
    chance = random.Random(seed)
    for _ in range(count):
        path, body = chance.choice(RIGHT)
        yield path, _mutated(body, chance)


def _mutated(body: dict[str, Any], chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        where = chance.choice(list(places(body)))
        change = chance.choice(CHANGES)
        changed = put(body, where, change(_at(body, where), chance))
        # A long text at each of many names would not fit into this process.
        body = changed if _can_be_sent(changed) else body
    raw = json.dumps(body, ensure_ascii=chance.random() < 0.8)
    raw_bytes = raw.encode("utf-8", "surrogatepass")
    if chance.random() < 0.2:
        raw_bytes = _bitten(raw_bytes, chance)
    return raw_bytes


def _can_be_sent(value: Any) -> bool:
    """Whether this process can write the value as JSON: not too large or too deep."""
    size, waiting = 0, [(value, 0)]
    while waiting:
        here, depth = waiting.pop()
        if depth > DEEPEST:
            return False
        if isinstance(here, dict):
            size += sum(len(key) + 4 for key in here)
            waiting += [(one, depth + 1) for one in here.values()]
        elif isinstance(here, list):
            size += 2 * len(here)
            waiting += [(one, depth + 1) for one in here]
        else:
            size += len(here) if isinstance(here, str) else 8
    return size <= MOST_BYTES


def _other(value: Any, chance: random.Random) -> Any:
    return chance.choice(ATOMS)


def _nested(value: Any, chance: random.Random) -> Any:
    for _ in range(chance.choice((1, 3, 70, 900))):
        value = [value] if chance.random() < 0.5 else {chance.choice(NAMES): value}
    return value


def _repeated(value: Any, chance: random.Random) -> Any:
    times = chance.choice((2, 20, 500, 500, 20_000))
    items = value if isinstance(value, list) and value else [chance.choice(ATOMS)]
    return (items * times)[:200_000]


def _many_names(value: Any, chance: random.Random) -> Any:
    count = chance.choice((2, 300, 300, 30_000))
    inner = value if not isinstance(value, (dict, list)) else 1
    return {f"{chance.choice(NAMES)}{n}": inner for n in range(count)}


def _long_text(value: Any, chance: random.Random) -> Any:
    return chance.choice('A9é\\["\n') * chance.choice((100, 5000, 5000, 1_000_000))


def _misspelt(value: Any, chance: random.Random) -> Any:
    if not isinstance(value, dict) or not value:
        return chance.choice(ATOMS)
    name = chance.choice(list(value))
    at = chance.randrange(len(name) + 1)
    other = name[:at] + chance.choice(("", "s", "_", "E")) + name[at + 1 :]
    return {other if key == name else key: one for key, one in value.items()}


def _without(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict) and value:
        gone = chance.choice(list(value))
        return {key: one for key, one in value.items() if key != gone}
    return value[1:] if isinstance(value, list) else None


def _with(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        return {**value, chance.choice(NAMES): chance.choice(ATOMS)}
    return [value, chance.choice(ATOMS)]


CHANGES: tuple[Callable[[Any, random.Random], Any], ...] = (
    *(_other, _other, _other, _nested, _repeated, _many_names),
    *(_long_text, _misspelt, _without, _with),
)


def _bitten(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw) + 1)
    return chance.choice(
        (
            raw[:at],
            raw[:at] + bytes([chance.randrange(256)]) + raw[at + 1 :],
            raw[:at] + raw[at // 2 : at] + raw[at:],
            raw + raw[at:],
            raw[:at].decode("utf-8", "replace").encode("utf-16"),
        )
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield places in a JSON value; of a list the first ones."""
    yield path
    if isinstance(value, dict):
        for key, child in value.items():
            yield from places(child, (*path, key))
    elif isinstance(value, list) and len(path) < 8:
        for index in range(min(len(value), 3)):
            yield from places(value[index], (*path, index))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def put(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    """A copy of the value with another one at a place."""
    if not path:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], other)
    return copy
