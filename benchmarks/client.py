# SPDX-License-Identifier: Apache-2.0
"""Upstream's `vllm bench serve`, once per line of its input.

Starting the client takes 15 seconds and a load half of one, so one process runs them
all. Each line is a JSON list of arguments; after each run one line on the original
output says that it has ended.
"""

import json
import os
import sys

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the client prints
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    answers.write("ready\n")
    for line in sys.stdin:
        main(parser.parse_args(json.loads(line)))
        answers.write("done\n")
