"""`z2a doctor`: what this machine has, what is wrong with it and what to do."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import Subparsers, add_json, add_verb, add_work, real, write_json_result
from zero2all.common.errors import BadInputError
from zero2all.common.language import padded
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.perf.doctor.finding import Finding

SHOWN = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}
EXAMPLE = "z2a doctor\n  z2a doctor --work my-workspace --json doctor.json"


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        verbs,
        "doctor",
        "look over this machine: GPUs, links, disk, versions, settings, and what to do",
        EXAMPLE,
        _doctor,
    )
    add_work(parser)
    parser.add_argument(
        "--seconds", type=real(1.0), default=10.0, metavar="N", help="wait for torch at most this long (default 10)"
    )
    parser.add_argument("--brief", action="store_true", help="show only what is not ok")
    add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from zero2all.perf.doctor.checkup import check_machine

    findings = check_machine(arguments.work, arguments.seconds)
    counts = Counter(finding.grade for finding in findings)
    found: dict[str, Any] = {"counts": counts, "findings": [asdict(finding) for finding in findings]}
    if not write_json_result(arguments.json, found):
        _print([each for each in findings if each.grade != "ok" or not arguments.brief])
        print(
            t(
                f"{counts['error']} errors, {counts['warning']} warnings, {counts['note']} notes; {counts['ok']} of "
                f"{len(findings)} findings are ok."
            )
        )
    return BadInputError.exit_code if counts["error"] else 0


def _print(findings: list[Finding]) -> None:
    from zero2all.cli.terminal import print_fitted

    area = ""
    for finding in findings:
        if finding.area != area:
            print(f"{t(finding.area)}:")
            area = finding.area
        print_fitted(f"  {padded(t(SHOWN[finding.grade]), 8)} {t(finding.found)}")
        for line in filter(None, (finding.why, finding.advice)):
            print_fitted(f"           {t(line)}")
