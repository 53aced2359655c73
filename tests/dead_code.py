# SPDX-License-Identifier: Apache-2.0
"""Finds unused code: `python -m tests.dead_code`, a part of `make lint`.

Vulture compares names. Names that only woven code uses are in the strings of edit
files, so strings are read as well. Ruff checks imports; code that only tests use counts
as dead.
"""

import ast
import sys
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).parents[1]
OURS = ("vllm", "fork", "benchmarks", "examples")
KINDS = {"function", "method", "class", "property", "unreachable_code"}
IGNORED_NAMES = [
    "leave_*",  # overrides of LibCST's, by a node's name
    "get_*",  # overrides of setuptools'
    "has_ext_modules",
    "setup_arguments",  # called by setup.py
    "cmd*",  # overrides of upstream's commands
    "new_message",  # called by upstream's encoder
    "writelines",  # of asyncio's transports
    "split_*",  # the weave writes calls of it, and of the next
    "streams_first",
    "HostMemory",  # named by an entry point
    "to_pandas",  # for users
    "supports",  # for other libraries
    "sample_cosines",
    "SteeringHookPacked",
    "scale_steering_spec",
    "hash_steering_config",
    "min_captured_prompt_position",
    "spec_touches_prompt",
    "vanilla",  # nnbench calls these of its backends
    "teardown",
    "create_backend",
    "logit_lens",
    "gen_steering",
    "activation_patching",
    "ablation",
    "SteeringController",  # for plug-ins of the earlier fork, as the next two
    "declared_graphsafe_keys",
    "capture_consumers_config",
    "load_activation_manifest",  # for users of the loader
    "load_sequence_activations",
    "compute_layer_statistics",
    "quick_load",
    "PatchStudy",  # for scripts of the earlier fork, as the next three
    "capture_clean",
    "positions_for",
    "zoom",
    "compare_tokens",
    "clearbox",  # named by an entry point
    "tokenizer_prepends_bos",  # interp-engine's server calls these
    "serves",
    "set_lens_jacobians",
    "add_lora_logits",  # called by upstream
    "tok",
    "layer_index_map",  # for users of vllm-lens
    "_*",  # overrides of upstream's, and validators, which are found by decorators
]
IGNORED_DECORATORS = ["@router.*", "@reading.*", "@mutating.*", "@closed.*", "@app.*"]


def unused() -> list[str]:
    """Yield `file:line: what` for all unused code."""
    found = Vulture(ignore_names=IGNORED_NAMES, ignore_decorators=IGNORED_DECORATORS)
    for folder in OURS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.scan(text, filename=path)
            for code in _code_in(text):
                found.scan(code, filename=path)
    return [
        f"{item.filename.relative_to(ROOT)}:{item.first_lineno}: {item.message}"
        for item in found.get_unused_code(min_confidence=60)
        if item.typ in KINDS
    ]


def _code_in(text: str) -> list[str]:
    """The strings of a file that are Python code other than a name."""
    strings = {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return sorted(code for code in strings if set(code) & set(".(") and _parses(code))


def _parses(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True


if __name__ == "__main__":
    sys.exit("\n".join(unused()) or None)
