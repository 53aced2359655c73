# SPDX-License-Identifier: Apache-2.0
"""Try all edits and the weave on this or another release, without building."""

import argparse
import json
import sys
from contextlib import redirect_stdout

from fork.building.builder import Order, open_release
from fork.building.check import Report, check
from fork.commands._options import add_build_options, order_from
from fork.progress import step
from fork.upstream.fetch import fetch_release
from fork.upstream.pins import load_upstream, machine_name
from fork.upstream.release import Release, unpack

_RELEASES = "vllm"
"""Project with a wheel of every release; its Python files are those of all devices."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_build_options(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON report")


def run(arguments: argparse.Namespace) -> int:
    """Check; returns 1 if anything does not fit."""
    order = order_from(arguments)
    with redirect_stdout(sys.stderr):
        release = _open(order)
        with step(f"weave vLLM {release.version}, as a trial"):
            report = check(order.checkout, release, order.jobs)
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    return 0 if report.fits else 1


def _open(order: Order) -> Release:
    upstream = load_upstream(order.checkout.pins, order.upstream)
    is_pinned = any(device == order.device for device, _ in upstream.wheels)
    if order.wheel is not None or is_pinned:
        return open_release(order)
    wheel = fetch_release(_RELEASES, upstream.version, machine_name())
    return unpack(wheel, python_only=True)


def _print(report: Report) -> None:
    for file in report.files:
        print(f"{'fits' if not file.faults else 'FAILS':<6}{file.module} ({file.what})")
        for fault in file.faults:
            print(f"      {fault.sentence}")
    print(report.summary)
