# SPDX-License-Identifier: Apache-2.0
"""The demo: serve a small model, capture its residual stream, steer it, plot it.

    make demo        or, in the environment:  python examples/demo/run.py

Takes about a minute; its picture, build/demo/residual_norm.png, is there as soon as
the server has answered. Then it extracts a vector from captured rows, shows how stories
change under it, and ends with a table of what was captured.
"""

import argparse
import json
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import httpx
from asking import TAG, Answer, Client
from comparing import Line, Rows, compare, hidden_states, load_reference
from picture import draw
from serving import (
    ENVIRONMENT,
    HOST,
    ServerFailure,
    free_port,
    running,
    serve_command,
)
from toning import COEFFICIENTS, HOOK, LAYER, MODULES, Steerer, bar, rises
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from vllm.steering.tables import side_by_side
from vllm.v1.capture.consumers.filesystem import read_request

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = ROOT / "examples" / "demo_model" / "weights"
MODEL = "demo"
PROMPTS = {
    "story-anna": "Anna went to the garden after lunch.",
    "story-max": "In the evening, Max walked to the harbour with his brother.",
}
QUESTION = "How was the weather?"
START_SECONDS = 420.0
STAGES = (
    ("", "importing vLLM"),
    ("Initializing a V1 LLM engine", "starting the engine and its worker"),
    ("Loading weights took", "weights loaded"),
    ("Warming up model", "warming up"),
    ("KV cache size", "engine ready, opening the HTTP routes"),
)
"""The server's state, by the last of these marks in its log."""
BAR = 20
LEAST_COSINE = 0.999  # rows in bfloat16 against a float32 reference


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; returns 0 if all rows agree with the reference."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _leave)
    out: Path = options.out.absolute()
    port = free_port(options.port)
    if port != options.port:
        print(f"Port {options.port} is taken; using {port}.")
    url = f"http://{HOST}:{port}"
    captures = out / "captures"
    key = secrets.token_hex(16)
    serve = [str(WEIGHTS), "--served-model-name", MODEL, "--max-num-seqs", "8"]
    serve += ["--enable-steering"]
    serve += ["--capture-consumers", f"filesystem:root={json.dumps(str(captures))}"]
    serve += [] if options.compiled else ["--enforce-eager"]

    step("1. Starting the server")
    print(f"  vllm serve {' '.join(serve)} --port {port}")
    start = time.monotonic()
    log = out / "server.log"
    try:
        command = serve_command(port, serve)
        environment = {**ENVIRONMENT, "VLLM_STEERING_API_KEY": key}
        with running(command, url, log, START_SECONDS, Progress(), environment):
            print(f"\n  ready after {time.monotonic() - start:.0f} s")
            answers = ask(Client(url, MODEL), options.tokens)
            picture(answers[0], captures, out / "residual_norm.png")
            with httpx.Client(base_url=url) as http:
                steered = steer(Steerer(http, MODEL, key), captures)
            step("9. Stopping the server")
        print("  stopped")
    except ServerFailure as failure:
        print(f"\ndemo: {failure}", file=sys.stderr)
        return 1
    agree = inspect(answers, captures)
    return 0 if agree and steered else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Capture and steer a small model.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "demo")
    parser.add_argument("--port", type=int, default=8000, help="tried first")
    parser.add_argument("--tokens", type=int, default=32, help="generated at most")
    parser.add_argument(
        "--compiled", action="store_true", help="with torch.compile: starts later"
    )
    return parser.parse_args(arguments)


def _leave(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)  # unwinds the stack, so the server is stopped


def step(text: str) -> None:
    """Print the title of the next step."""
    print(f"\n{text}", flush=True)


class Progress:
    """Shows how far a server's start is: a bar on a terminal, else a line a stage."""

    def __init__(self) -> None:
        self._shown = -1

    def __call__(self, seconds: float, log: str) -> None:
        """Show the state after `seconds`, by the log so far."""
        stage = max(n for n, (mark, _) in enumerate(STAGES) if mark in log)
        filled = BAR * (stage + 1) // (len(STAGES) + 1)
        share, bar = 100 * filled // BAR, "#" * filled
        line = f"  [{bar:{BAR}}] {share:2} % {seconds:3.0f} s  {STAGES[stage][1]}"
        if sys.stdout.isatty():
            print(f"\r{line:<79}", end="", flush=True)
        elif stage != self._shown:
            print(line, flush=True)
        self._shown = stage


def ask(client: Client, tokens: int) -> list[Answer]:
    """Send the requests; returns the responses."""
    step(f"2. {len(PROMPTS)} completions at a time, all layers and points captured")
    answers = client.complete_all(PROMPTS, tokens)
    for answer in answers:
        print(f"  {answer.prompt}|{answer.text}")
        print(f"    capture: {_outcome(answer)}")
    step("3. A streamed chat, captured too")
    print(f"  {QUESTION}\n  ", end="")
    chat = client.chat(
        "chat", QUESTION, tokens, lambda piece: print(piece, end="", flush=True)
    )
    print(f"\n    capture: {_outcome(chat)}")
    step("4. A request that asks for layer 99 is refused before anything runs")
    print(f"  {client.refusal(99)}")
    return [*answers, chat]


def steer(steerer: Steerer, captures: Path) -> bool:
    """Extract and apply a vector; whether the tone rises with its coefficient."""
    step(f"6. A tone vector, from captured rows of stories ({HOOK} of layer {LAYER})")
    found = steerer.extract(captures)
    share = found.norm / found.stream_norm
    print(f"  cheerful less gloomy: norm {found.norm:.2f}, {share:.0%} of the stream's")
    for name, norm in steerer.register(found).items():
        print(f"  registered: {name!r}, norm {norm:.2f}")
    step("7. The same prompts, unsteered and steered")
    names = [None, *MODULES]
    texts = [steerer.told(list(PROMPTS.values()), name) for name in names]
    width = shutil.get_terminal_size((110, 24)).columns
    titles = [f"steering_name: {name}" if name else "unsteered" for name in names]
    for prompt, *columns in zip(PROMPTS.values(), *texts):
        print(f"\n  {prompt}\n{side_by_side(titles, columns, width)}")
    step("8. The mean tone of stories, from -1 (gloomy) to 1 (cheerful)")
    scores = []
    for coefficient in COEFFICIENTS:
        scores.append(steerer.score(found, coefficient))
        print(
            f"  vector times {coefficient:+.1f}  {scores[-1]:+.2f}  {bar(scores[-1])}"
        )
    if not rises(scores):
        print("demo: the tone does not rise with the coefficient", file=sys.stderr)
    return rises(scores)


def _outcome(answer: Answer) -> str:
    result = answer.results["filesystem"]
    if result["status"] != "ok":
        return f"{result['status']}: {result['error']}"
    return f"ok, {len(result['payload'])} files in {Path(result['payload'][0]).parent}"


def inspect(answers: list[Answer], captures: Path) -> bool:
    """Compare with HF transformers; whether every cosine is high enough."""
    step("10. Computing the same hidden states with HF transformers, in float32")
    disable_progress_bar()
    model = load_reference(WEIGHTS)
    lines: list[Line] = []
    for answer in answers:
        rows, token_ids, _ = _read(captures, answer.name)
        lines = compare(rows, hidden_states(model, token_ids))
        worst = min(line.cosine for line in lines)
        print(f"  {answer.name}: {len(lines)} streams, smallest cosine {worst:.5f}")
        if worst < LEAST_COSINE:
            print(f"demo: {answer.name} differs from transformers", file=sys.stderr)
            return False
    _print_table(lines, answers[-1].name)
    return True


def _read(captures: Path, name: str) -> tuple[Rows, list[int], int]:
    rows = read_request(captures, TAG, name)
    sidecar = json.loads((captures / TAG / name / "0_pre_attn.json").read_text())
    return rows, sidecar["token_ids"], sidecar["num_prompt_tokens"]


def _print_table(lines: list[Line], name: str) -> None:
    print(f"\n  captured of {name!r}:")
    print("  layer  point       rows x width  dtype     mean norm  cosine   rel. error")
    for line in lines:
        shape = f"{line.shape[0]} x {line.shape[1]}"
        print(
            f"  {line.layer:>5}  {line.point:<10}  {shape:>12}  {line.dtype:<8}"
            f"  {line.norm:9.3f}  {line.cosine:.5f}  {line.error:10.1e}"
        )


def picture(answer: Answer, captures: Path, path: Path) -> None:
    """Draw the picture of one request."""
    step("5. Drawing the norm of the residual stream over layers and tokens")
    rows, token_ids, num_prompt_tokens = _read(captures, answer.name)
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    tokens = [tokenizer.decode([token]).strip() or "_" for token in token_ids]
    draw(path, rows, tokens, num_prompt_tokens)
    print(f"  {path}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
