# SPDX-License-Identifier: Apache-2.0
"""Options shared by commands of `vllm steer`."""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMValidationError
from vllm.v1.residual.numbers import Fail
from vllm.v1.residual.tap import HOOK_NAMES, did_you_mean, hook_name, parse_address
from vllm.v1.steering.errors import fail

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.steering.pairs import Prompt
    from vllm.v1.steering.spec.reading import Reading


@contextmanager
def started_engine(args: argparse.Namespace, **fields: Any) -> "Iterator[LLM]":
    """Run the engine that the options describe; `fields` override arguments.

    With `--server` it is that server, where a command has the option.
    """
    if (server := getattr(args, "server", None)) is not None:
        with _server(server, args.api_key) as engine:
            yield engine
        return
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    print(f"loading {args.model}", file=sys.stderr)
    try:
        engine_args = EngineArgs.from_cli_args(args)
        for name, value in fields.items():
            setattr(engine_args, name, value)
        llm = LLM.from_engine_args(engine_args)
    except VLLMValidationError:
        raise  # Of a parameter of ours, which it names.
    except (ValueError, OSError) as error:
        raise fail(f"model: {args.model!r}: {error}", "model", args.model) from None
    try:
        yield llm
    finally:
        engine = llm.llm_engine
        engine.residual.settle(engine.engine_core)
        engine.engine_core.shutdown()


def check_engine(args: argparse.Namespace) -> None:
    """Refuse options that name no engine, or several, and a file that cannot be."""
    file = getattr(args, "json", None)
    if file is not None and not file.absolute().parent.is_dir():
        folder = str(file.parent)
        raise fail(f"json: there is no folder {folder!r}; create it", "json", folder)
    if (args.model is None) == (getattr(args, "server", None) is None):
        other = " or --server URL, not both" if hasattr(args, "server") else ""
        message = f"model: give the model to load with --model{other}"
        raise fail(message, "model", args.model)


def check_client(url: str) -> None:
    """Refuse a server where the client, which asks it, is not installed."""
    if find_spec("clearbox_client") is None:
        message = "server: the client asks it: pip install clearbox-client"
        raise fail(message, "server", url)


@contextmanager
def _server(url: str, api_key: str | None) -> Iterator[Any]:
    check_client(url)
    from clearbox_client import ClearboxError

    from vllm.steering.server import ServerEngine

    try:
        with closing(ServerEngine(url, api_key)) as engine:
            yield engine
    except ClearboxError as error:
        raise fail(f"server: {url}: {error}", "server", url) from None


def add_server_arguments(parser: Any) -> None:
    """Add the options of a server in place of an engine."""
    group = parser.add_argument_group("server", "Use a server, in place of --model.")
    group.add_argument(
        "--server", metavar="URL", help="Its URL, such as http://host:8000."
    )
    group.add_argument("--api-key", help="Its API key.")


def parse_hook(text: str) -> str:
    """Parse the name of a hook point, ours or another library's, or an address.

    Raises:
        argparse.ArgumentTypeError: the text is neither.

    """
    if parse_address(text) is not None:
        return text
    name = hook_name(text)
    if name is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a hook point; use one of {list(HOOK_NAMES)}, or an "
            f"address such as post_block.3{did_you_mean(text)}"
        )
    return name


def resolve_address(args: argparse.Namespace) -> None:
    """Replace an address in `args.hook` by its hook point and `args.layers`.

    Raises:
        SteeringValidationError: `--layers` is given too.

    """
    tap = parse_address(args.hook)
    if tap is None:
        return
    if args.layers is not None:
        raise fail(
            f"layers: leave out --layers, because the address {args.hook!r} includes "
            "the layer",
            "layers",
            args.layers,
        )
    args.layers, args.hook = [tap[0]], tap[1]


def parse_layers(text: str) -> list[int] | None:
    """Parse layers: `2,4-6` is `[2, 4, 5, 6]`, `all` is None.

    Raises:
        argparse.ArgumentTypeError: the text is neither.

    """
    if text == "all":
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() for end in ends):
            raise argparse.ArgumentTypeError(f"{part!r} is neither a number nor L-L")
        start, stop = map(int, ends)
        if start > stop:
            raise argparse.ArgumentTypeError(f"{part!r} is a descending range")
        layers.update(range(start, stop + 1))
    return sorted(layers)


SHARED: dict[str, dict[str, Any]] = {
    "--vectors": {"required": True, "metavar": "FILE", "help": "Any form."},
    "--hook": {
        "type": parse_hook,
        "default": "post_block",
        "help": f"The hook point: {', '.join(HOOK_NAMES)}, or an address with its "
        "layer, such as resid_post.3.",
    },
    "--layers": {
        "type": parse_layers,
        "metavar": "L,L-L,...",
        "help": "Layers, counted from 0, such as 3 or 2,4-6; all by default.",
    },
    "--position": {
        "choices": ("last", "mean"),
        "default": "last",
        "help": "A text's row, or value: of its last token, or the mean over tokens.",
    },
    "--out": {
        "required": True,
        "type": Path,
        "metavar": "FILE",
        "help": "Output file, which ends in .safetensors.",
    },
    "--plot": {
        "type": Path,
        "metavar": "FILE",
        "help": "Plot to write, such as a.png.",
    },
    "--json": {
        "type": Path,
        "metavar": "FILE",
        "help": "File for all numbers, and texts.",
    },
}
"""Options of several commands."""


def add_shared(parser: Any, *names: str) -> None:
    """Add options of `SHARED`."""
    for name in names:
        parser.add_argument(name, **SHARED[name])


def check_out(args: argparse.Namespace, fail: Fail, advice: str = "") -> None:
    """Refuse an `--out` that is no new file of tensors in an existing folder."""
    if args.out.suffix != ".safetensors" or not args.out.absolute().parent.is_dir():
        raise fail(
            f"out: {str(args.out)!r} must end in .safetensors, in an existing folder"
            f"{advice}",
            "out",
            str(args.out),
        )


def add_scales_argument(parser: Any, default: str) -> None:
    """Add the option `--scales`."""
    parser.add_argument(
        "--scales",
        type=parse_scales,
        default=parse_scales(default),
        metavar="S,S,...",
        help=f"Factors of the vectors; {default} by default.",
    )


def parse_scales(text: str) -> list[float]:
    """Parse coefficients: `-1,0.5` is `[-1.0, 0.5]`.

    Raises:
        argparse.ArgumentTypeError: a part is not a finite number.

    """
    try:
        scales = [float(part) for part in text.split(",")]
    except ValueError:
        scales = [math.nan]
    if not all(map(math.isfinite, scales)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers")
    return scales


def add_reading_arguments(parser: Any) -> None:
    """Add the options that supply what a file of another library may lack."""
    from vllm.v1.steering.spec.reading import GGUF_LAYERS, NUMBERS

    group = parser.add_argument_group(
        "reading",
        "Facts that the file does not contain; they may also follow its name, as in "
        "FILE?hook=post_block&layer=15.",
    )
    group.add_argument(
        "--hook",
        type=parse_hook,
        help="The hook point, or an address such as resid_post.3, of a vector whose "
        "file names no place; of other files, the vectors to read.",
    )
    group.add_argument("--layer", type=int, help="The layer, in the same way.")
    group.add_argument("--key", help="The tensor to use of a file with several.")
    group.add_argument(
        "--numbers",
        choices=list(NUMBERS),
        help="The meaning of a number k as a key of a dictionary. "
        + " ".join(f"{name}: {what}." for name, what in NUMBERS.items()),
    )
    group.add_argument(
        "--gguf-layers",
        choices=GGUF_LAYERS,
        help="applied, the default: direction.L of a GGUF file acts on the output of "
        "block L, counted from 0, as in repeng and llama.cpp; measured: where it was "
        "measured, in files of llama.cpp's cvector-generator block L - 1.",
    )
    group.add_argument("--feature", type=int, help="The feature of an SAE.")


def reading_of(args: argparse.Namespace) -> "Reading":
    """The `Reading` that the options describe."""
    from vllm.v1.steering.spec.reading import Reading

    return Reading.resolved(
        hook=args.hook,
        layer=args.layer,
        numbers=args.numbers,
        gguf_layers=args.gguf_layers,
        feature=args.feature,
        key=args.key,
    )


def add_prompt_arguments(parser: Any) -> None:
    """Add the options for prompts and sampling."""
    group = parser.add_argument_group("generation", "Prompts and sampling.")
    group.add_argument(
        "--prompt", action="append", default=[], help="A prompt; repeatable."
    )
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help="Prompts: one per line, or .jsonl with texts or lists of chat messages.",
    )
    group.add_argument(
        "--chat", action="store_true", help="Send texts as a user's chat messages."
    )
    group.add_argument(
        "--max-tokens", type=int, default=40, help="Most tokens to generate."
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, help="0 is greedy; see --seed."
    )


def prompts_of(args: argparse.Namespace) -> "list[Prompt]":
    """The prompts that the options give.

    Raises:
        SteeringValidationError: there are no prompts, or texts and chats are mixed.

    """
    from vllm.steering.pairs import read_prompts

    prompts: list[Prompt] = list(args.prompt)
    if args.prompts is not None:
        prompts += read_prompts(args.prompts)
    if not prompts:
        raise fail("prompt: give --prompt TEXT or --prompts FILE", "prompt", None)
    prompts = as_chats(prompts) if args.chat else prompts
    if len({type(prompt) for prompt in prompts}) > 1:
        raise fail("prompts: texts and chats are mixed; use --chat", "prompts", None)
    return prompts


def as_chats(prompts: "list[Prompt]") -> "list[Prompt]":
    """The prompts, with texts as a user's message."""
    return [
        [{"role": "user", "content": one}] if isinstance(one, str) else one
        for one in prompts
    ]


def sampling_of(args: argparse.Namespace, **fields: Any) -> "SamplingParams":
    """The sampling parameters that the options describe."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        **fields,
    )
