# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm check`: compares an engine's rows with those of Transformers."""

import argparse
import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vllm import LLM

PROMPT = "The house stood at the end of the road, and nobody had lived there for years."
BOUNDS = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}
"""By the name of the engine's dtype, the largest allowed difference between a layer's
rows and the library's in float32, relative to the norm of all its rows."""

ENTERING, LEAVING = "pre_attn", "post_block"


Rows = Mapping[tuple[int, str], "torch.Tensor"]
"""`(layer, hook)` -> `[tokens, hidden_size]`."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between the rows of a layer and the library's."""

    layer: int
    hook: str
    relative: float
    """Length of the difference over the length of the library's rows."""
    largest: float
    """The largest difference of a value."""


def add_arguments(parser: Any) -> None:
    """Declare the options."""
    parser.add_argument("checked", metavar="MODEL", help="Name or folder of the model.")
    group = parser.add_argument_group("check", "The hook points to compare.")
    group.add_argument("--prompt", default=PROMPT, help="The prompt to run.")
    group.add_argument(
        "--max-tokens", type=int, default=8, help="Tokens to generate, greedily."
    )
    group.add_argument(
        "--tolerance",
        type=float,
        default=None,
        help="Largest allowed relative difference; the default depends on --dtype.",
    )


def run(args: argparse.Namespace) -> int:
    """Compare, and return the exit status."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm.engine.arg_utils import EngineArgs

    args.model = args.checked
    if args.max_tokens < 1:
        return _print_error(f"--max-tokens {args.max_tokens}: it must be 1 or more")
    engine_args = EngineArgs.from_cli_args(args)
    engine_args.capture_consumers = [{"name": "inline"}]
    try:
        tokens, rows = _captured(engine_args, args)
        states = library_states(engine_args, tokens)
        differences = compare(rows, states)
    except (ValueError, OSError) as error:
        return _print_error(str(error))
    return verdict(differences, len(tokens), dtype_of(rows), args.tolerance)


def _captured(engine_args: Any, args: argparse.Namespace) -> tuple[list[int], Rows]:
    """Capture with an engine that is then released: the library needs its memory."""
    from vllm import LLM

    llm = LLM.from_engine_args(engine_args)
    try:
        return capture(llm, args.prompt, args.max_tokens)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def capture(llm: "LLM", prompt: str, max_tokens: int) -> tuple[list[int], Rows]:
    """The tokens of a prompt and its continuation, without the last, and their rows.

    Args:
        llm: an engine with `inline`.
        prompt: the prompt.
        max_tokens: number of tokens to generate.

    """
    from vllm import SamplingParams

    hooks = {ENTERING: "all", LEAVING: "all"}
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        capture={"inline": {"hooks": hooks, "positions": "all"}},
    )
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.capture_results is not None and output.prompt_token_ids is not None
    result = output.capture_results["inline"]
    if result.status != "ok":
        raise ValueError(f"the capture failed: {result.error}")
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    return tokens[:-1], dict(result.payload)


def dtype_of(rows: Rows) -> str:
    """The name of the rows' dtype."""
    return str(next(iter(rows.values())).dtype).removeprefix("torch.")


def library_states(engine_args: Any, token_ids: list[int]) -> "list[torch.Tensor]":
    """Transformers' hidden states in float32: the inputs of layers 0, 1, ..."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        engine_args.model,
        revision=engine_args.revision,
        trust_remote_code=engine_args.trust_remote_code,
        dtype=torch.float32,
    ).eval()
    with torch.no_grad():
        ids = torch.tensor([token_ids])
        states = model(ids, output_hidden_states=True).hidden_states
    return [state[0] for state in states]


def compare(captured: Rows, states: "list[torch.Tensor]") -> list[Difference]:
    """The difference at each hook point that the library has.

    Its last state is taken after the final norm, so the output of the last layer is not
    compared.

    Raises:
        ValueError: the numbers of layers differ.

    """
    count = max(layer for layer, _ in captured) + 1
    if len(states) != count + 1:
        raise ValueError(
            f"the engine has {count} layers and Transformers {len(states) - 1}"
        )
    differences = []
    for (layer, hook), rows in sorted(captured.items()):
        at = layer + (hook == LEAVING)
        if at == count:
            continue
        wanted, found = states[at].float().cpu(), rows.float().cpu()
        apart = found - wanted
        length = max(float(wanted.norm()), sys.float_info.min)
        relative = float(apart.norm()) / length
        differences.append(Difference(layer, hook, relative, float(apart.abs().max())))
    return differences


def verdict(
    differences: list[Difference], num_tokens: int, dtype: str, tolerance: float | None
) -> int:
    """Print each difference and the verdict; returns the exit status.

    Args:
        differences: those of all compared hook points.
        num_tokens: the number of tokens that were compared.
        dtype: the name of the engine's dtype.
        tolerance: largest allowed relative difference; None for that of the dtype.

    """
    bound = BOUNDS[dtype] if tolerance is None else tolerance
    print(f"{'layer':>5}  {'hook':<10}  {'relative':>9}  {'largest':>9}")
    for one in differences:
        print(f"{one.layer:5}  {one.hook:<10}  {one.relative:9.2e}  {one.largest:9.2e}")
    # NaN counts as a difference.
    bad = [one for one in differences if not one.relative <= bound]
    if bad or not differences:
        where = f"layer {bad[0].layer} {bad[0].hook}" if bad else "nothing"
        print(
            f"FAILED: {len(bad)} of {len(differences)} hook points deviate by more "
            f"than {bound:g} from Transformers in float32; the first is {where}"
        )
        return 1
    print(
        f"OK: {num_tokens} tokens at {len(differences)} hook points "
        f"agree with Transformers in float32 within {bound:g} ({dtype})"
    )
    return 0


def _print_error(message: str) -> int:
    print(f"vllm check: {message}", file=sys.stderr)
    return 1
