# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm bench serve`, once per request of the parent.

Starting the client takes 15 seconds and a load half of one, so one process runs them
all. Each request is a list of arguments.
"""

import sys
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for `benchmarks`

from benchmarks.child import answers, requests

if __name__ == "__main__":
    answer = answers()
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    answer("ready")
    for arguments in requests():
        main(parser.parse_args(arguments))
        answer("done")
