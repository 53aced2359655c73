# SPDX-License-Identifier: Apache-2.0
"""Runs upstream's `vllm bench serve` once per request of the parent.

Starting the client takes 15 seconds and a load half a second, so one process runs all
of them. Each request has a list of arguments, and a list of JSON bodies whose fields
the load's requests get in turn.
"""

import sys
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for `benchmarks`

from benchmarks.harness.child import answers, requests

draw_samples = serve.get_samples


def with_bodies(bodies: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    """Upstream's requests, each with its own body; `--extra-body` has one for all."""
    samples = draw_samples(*args, **kwargs)
    if bodies:
        for sample, body in zip(samples, cycle(bodies)):
            sample.request_overrides = body
    return samples


if __name__ == "__main__":
    answer = answers()
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    answer("ready")
    for request in requests():
        serve.get_samples = partial(with_bodies, request["bodies"])
        serve.main(parser.parse_args(request["arguments"]))
        answer("done")
