"""`z2a doctor`: what this machine has, what is wrong with it and what to do."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.terminal import print_fitted, print_table
from zero2all.cli.verb import LAST_PORT, verb, write_json_result
from zero2all.common.errors import BadInputError, UnhealthyError, UsageError
from zero2all.common.language import padded
from zero2all.common.language import translate as t
from zero2all.common.progress import tell

if TYPE_CHECKING:
    from zero2all.measure.doctor.finding import DoctorFinding
    from zero2all.measure.doctor.network import Measured

SECRET_FILE = "z2a-doctor.secret"
"""What a listener makes where it is given no secret."""
SHOWN = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}


@verb("""
    doctor: look over this machine: GPUs, links, disk, versions, settings, and what to do

    --work
    --seconds N:float>=1 =30  wait for torch at most this long (default 30)
    --brief                   show only what is not ok
    --network                 only the network: interface, NVLink, InfiniBand, the variables of NCCL and gloo, speed to
        the peers
    --listen [HOST:]PORT      with --network: answer the measurements of others who know the secret, until Ctrl-C
    --secret-file FILE:path   with --peer and --listen: the secret of the listeners (else Z2A_SECRET)
    --ranks N:int>=2          only the health check: a matrix product in each of N processes, and an exchange between
        all neighbours
    --peer* HOST:PORT         with --network: measure to another machine, which runs `--listen PORT`; repeat it for
        every machine
    --json FILE:out           also write the result as JSON; - prints only that

    z2a doctor
    z2a doctor --work my-workspace --json doctor.json
    z2a doctor --ranks 8
    z2a doctor --network --listen 29700
    z2a doctor --network --peer 10.0.0.2:29700 --peer 10.0.0.3:29700
    """)
def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.ranks:
        return _check_ranks(arguments)
    if (arguments.peer or arguments.listen) and not arguments.network:
        raise UsageError("--peer and --listen belong to --network. Add --network.")
    if arguments.listen:
        return _listen(arguments)
    pairs: dict[tuple[str, str], Measured] = {}
    if arguments.network:
        from zero2all.measure.doctor.network import look_at_ways, measure_pairs, pair_findings, pair_rows

        findings = list(look_at_ways(arguments.peer))
        if arguments.peer:
            pairs = measure_pairs(arguments.peer, _secret(arguments.secret_file))
        findings += pair_findings(pairs)
    else:
        from zero2all.measure.doctor.checkup import check_machine

        findings = check_machine(arguments.work, arguments.seconds)
    counts = Counter(finding.grade for finding in findings)
    found: dict[str, Any] = {"counts": counts, "findings": [asdict(finding) for finding in findings]}
    if pairs:
        found["pairs"] = [{"from": first, "to": second, **asdict(one)} for (first, second), one in pairs.items()]
    if not write_json_result(arguments.json, found):
        _print([each for each in findings if each.grade != "ok" or not arguments.brief])
        if pairs:
            print_table(pair_rows(pairs), "between the machines")
        tell(
            f"errors: {counts['error']}, warnings: {counts['warning']}, notes: {counts['note']}; {counts['ok']} of "
            f"{len(findings)} findings are ok."
        )
    return BadInputError.exit_code if counts["error"] else 0


def _listen(arguments: argparse.Namespace) -> int:
    from zero2all.common.secret import given_secret, shared_secret
    from zero2all.measure.doctor.network import listen

    host, _, port = arguments.listen.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) <= LAST_PORT:
        raise UsageError(f"--listen {arguments.listen} is not a port. Expected PORT or HOST:PORT, such as 29700.")
    given = given_secret(arguments.secret_file)

    def ready(address: str) -> None:
        tell(f"listening on {address}; Ctrl-C ends it", flush=True)
        if given is None:
            tell(
                f"The secret is in {SECRET_FILE} of this folder, which only you can read. Copy it to the other "
                f"machines, listeners too, and add --secret-file {SECRET_FILE} there.",
                flush=True,
            )

    with suppress(KeyboardInterrupt):
        listen(host.strip("[]"), int(port), given or shared_secret(Path(SECRET_FILE)), ready)
    return 0


def _secret(path: Path | None) -> bytes:
    from zero2all.common.secret import given_secret

    if (secret := given_secret(path)) is None:
        raise UsageError(
            f"--peer needs the secret of the listeners. `z2a doctor --network --listen PORT` writes it into "
            f"{SECRET_FILE}: copy that file here, and add --secret-file {SECRET_FILE}."
        )
    return secret


def _check_ranks(arguments: argparse.Namespace) -> int:
    if "LOCAL_RANK" not in os.environ:
        from zero2all.parallel.launch import run_processes

        return run_processes(arguments.ranks, arguments.command_line)
    from zero2all.measure.doctor.checkup import check_ranks

    found = check_ranks()
    bad = {**found.slow, **found.broken}
    if os.environ["RANK"] == "0" and not write_json_result(arguments.json, asdict(found)):
        print("\n".join(t(line) for line in [found.note(), *(bad.values() or ["all ranks are well"])]))
    return UnhealthyError.exit_code if bad else 0


def _print(findings: list[DoctorFinding]) -> None:
    area = ""
    for finding in findings:
        if finding.area != area:
            print(f"{t(finding.area)}:")
            area = finding.area
        print_fitted(f"  {padded(t(SHOWN[finding.grade]), 8)} {t(finding.found)}")
        for line in filter(None, (finding.why, finding.advice)):
            print_fitted(f"           {t(line)}")
