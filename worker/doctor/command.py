"""The command line: ``python -m worker doctor [--json]``.

Loads no model and changes nothing. Exit 0 if a worker can be started here, 1 if something lacks,
2 for wrong arguments, or if the findings cannot be written.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from adapters.standard_output import discard, may_be_cut_off
from worker.doctor.machine import machine
from worker.doctor.packages import packages
from worker.doctor.ports import ports


def main(argv: Sequence[str]) -> int:
    """The exit status; a line a finding, or one JSON array, is on standard output."""
    options = _parse(argv)
    findings = [*machine(Path("/"), os.environ), *packages(), *ports(os.environ)]
    width = max(len(each.name) for each in findings)
    lines = [each.line(width) for each in findings]
    if options.json:
        lines = [json.dumps([each.to_json() for each in findings], indent=1)]  # JSON in any encoding
    try:
        with may_be_cut_off():
            print(*lines, sep="\n")
    except OSError as error:  # its disk is full
        discard()
        print(f"worker doctor: error: standard output: {error.strerror}", file=sys.stderr)
        return 2
    return int(any(each.level == "lacks" for each in findings))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m worker doctor",
        description="Say what this machine offers a worker and what it lacks, a line each with its mend.",
    )
    parser.add_argument("--json", action="store_true", help="print an array of objects instead of lines")
    return parser.parse_args(argv)
