"""`z2a launch`: start a run on many machines, or write the file with which a cluster does."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.verb import group, share, verb
from zero2all.common.errors import UsageError
from zero2all.common.progress import say, tell

if TYPE_CHECKING:
    from zero2all.parallel.job_files import ClusterJob

share(
    """
    config --work
    --nodes! N or MIN:MAX:nodes   machines; MIN:MAX: the run goes on while at least MIN of MAX are there
    --gpus-per-node N:int>=0 =8   GPUs of each (default 8)
    --save-seconds N:int>=1 =300  time to save before the job is ended (default 300)
    --out FILE:out                write to this file instead of the terminal
    """,
    "JOB",
)
group("""
    launch: start a run on many machines

    z2a launch slurm z2all-1b --nodes 4
    """)


def _train_words(arguments: argparse.Namespace, python: str) -> tuple[str, int, list[str]]:
    """The name of the run, its restarts, and the command that trains it. Not `z2a`, whose first line names its Python:
    the kernel cuts that line at 256 characters, and virtual environments may have longer paths."""
    from zero2all.config import load_config

    config = load_config(arguments.config, arguments.overrides)
    if config.diloco.groups and config.diloco.group is None:
        raise UsageError(
            "diloco.groups: this verb starts the machines of one group. Start one job per group, and say "
            "which: add --diloco.group 0, then 1, and so on."
        )
    words = ["train", arguments.config, "--work", str(arguments.work), *arguments.overrides]
    if not config.resilience.supervise:  # or a machine that fails could not come back
        words += ["--resilience.supervise", "true"]
    return config.train.name, config.resilience.restarts, [python, "-m", "zero2all", *words]


def _job(arguments: argparse.Namespace, python: str) -> tuple[ClusterJob, int]:
    """The run as a job of a cluster, and how often it may be started again."""
    from zero2all.parallel.job_files import ClusterJob, job_name

    run, restarts, command = _train_words(arguments, python)
    sizes = (arguments.nodes, arguments.gpus_per_node, arguments.save_seconds)
    return ClusterJob(job_name(run), command, *sizes), restarts


@verb("""
    launch slurm: write a batch file for Slurm

    JOB
    --time TIME =24:00:00         time limit of the job (default 24:00:00)
    --partition NAME              partition of the cluster (default: Slurm's)
    --account NAME                account that pays for the job (default: Slurm's)
    --section.field

    z2a launch slurm z2all-1b --nodes 4 --time 24:00:00 --out job.sh
    """)
def _slurm(arguments: argparse.Namespace) -> None:
    from zero2all.parallel.job_files import slurm_file, slurm_seconds

    try:
        if slurm_seconds(arguments.time) <= arguments.save_seconds:
            raise UsageError(
                f"--save-seconds is {arguments.save_seconds}, and --time {arguments.time} is not longer: the run would "
                f"be told to save at once. Give a longer time."
            )
    except ValueError:
        raise UsageError(
            f"--time is {arguments.time!r}. Expected a time limit as Slurm reads it, such as 24:00:00 or 2-12:00:00."
        ) from None
    job, restarts = _job(arguments, sys.executable)
    asked = (arguments.time, restarts, arguments.partition, arguments.account)
    _write(arguments.out, slurm_file(job, str(Path.cwd()), *asked), "sbatch")


@verb("""
    launch kubernetes: write a manifest for Kubernetes (a JobSet)

    JOB
    --image NAME =zero2all        container image (default zero2all)
    --claim NAME =workspace       volume claim with the workspace, mounted at /workspace (default workspace)
    --section.field

    z2a launch kubernetes z2all-1b --nodes 2 --image registry.example/zero2all --claim work --out job.yaml
    """)
def _kubernetes(arguments: argparse.Namespace) -> None:
    from zero2all.config import find_config
    from zero2all.parallel.job_files import MOUNT, kubernetes_file

    text = kubernetes_file(_job(arguments, "python")[0], arguments.image, arguments.claim)
    if not (work := Path(os.path.normpath(MOUNT / arguments.work))).is_relative_to(MOUNT):
        say(f"z2a: note: --work {work} is not in {MOUNT}, where the pods have the claim. Give its folder there.")
    if (path := Path(arguments.config)) == find_config(arguments.config):
        say(f"z2a: note: the pods read the config at {MOUNT / path}. Copy it to the claim.")
    _write(arguments.out, text, "kubectl apply -f")


def _write(path: Path | None, text: str, submit: str) -> None:
    from zero2all.common.files import atomic_file

    if path is None:
        print(text, end="")
        return
    with atomic_file(path) as file:
        os.fchmod(file.fileno(), 0o600)  # a manifest holds the secret of the run
        file.write(text.encode())
    tell(f"wrote {path}. Start it with: {submit} {shlex.quote(str(path))}")


@verb("""
    launch ssh: start a run on a list of hosts over ssh, and show what they print

    config --work
    --hosts! A,B,C          hosts as ssh knows them; the first is machine 0
    --rendezvous HOST:PORT  machine 0 as the others reach it (default: the first host)
    --folder DIR            folder to start in on every host (default: this one)
    --python FILE           Python with zero2all on every host (default: this one)
    --section.field

    z2a launch ssh z2all-1b --hosts gpu1,gpu2 --work /data/my-workspace
    """)
def _ssh(arguments: argparse.Namespace) -> int:
    from zero2all.common.secret import given_secret, new_secret
    from zero2all.parallel.nodes import DEFAULT_PORT, read_address
    from zero2all.parallel.ssh import run_on_hosts
    from zero2all.track.ssh import COMMAND_VARIABLE, OPTIONS

    hosts = [host.strip() for host in arguments.hosts.split(",") if host.strip()]
    is_wrong = any(host.startswith("-") or len(host.split()) > 1 or "[" in host for host in hosts)
    if is_wrong or len(hosts) < 2 or len(set(hosts)) < len(hosts):
        raise UsageError(
            f"--hosts is {arguments.hosts!r}. Expected two or more different hosts as ssh takes them, with commas "
            f"between them, such as gpu1,gpu2 or fd00::1,fd00::2."
        )
    first = hosts[0].rpartition("@")[2]
    rendezvous = arguments.rendezvous or f"{f'[{first}]' if ':' in first else first}:{DEFAULT_PORT}"
    read_address(rendezvous, "--rendezvous")
    *_, command = _train_words(arguments, arguments.python or sys.executable)
    commands = {
        host: [*command, "--nodes", str(len(hosts)), "--node-rank", str(rank), "--rendezvous", rendezvous]
        for rank, host in enumerate(hosts)
    }
    ssh = [*(shlex.split(os.environ.get(COMMAND_VARIABLE, "")) or ["ssh"]), *OPTIONS]
    secret = (given_secret(None) or new_secret().encode()).decode(errors="surrogateescape")
    return run_on_hosts(commands, arguments.folder or str(Path.cwd()), ssh, secret)


@verb("""
    launch secret: make the secret of a run whose machines share no folder

    file FILE:path  a new file; copy it to every machine

    z2a launch secret z2a.secret
    """)
def _secret(arguments: argparse.Namespace) -> None:
    from zero2all.common.secret import make_secret

    try:
        make_secret(arguments.file)
    except OSError as error:
        raise UsageError(f"{arguments.file} cannot be made: {error.strerror or error}. Give a new file.") from error
    tell(f"wrote {arguments.file}. Copy it to every machine, and start all with: --secret-file {arguments.file}")
