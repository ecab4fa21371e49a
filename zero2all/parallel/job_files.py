"""Files that start a run on a cluster: a batch file for Slurm, a manifest for Kubernetes. They say why each line is
there, because people will change them."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from zero2all.common.errors import NEVER_AGAIN, PreemptedError, UnhealthyError
from zero2all.common.secret import VARIABLE, new_secret
from zero2all.parallel.nodes import DEFAULT_PORT, SLURM_PORTS

MOUNT = "/workspace"
"""Where the pods of Kubernetes have the claim with the workspace."""


def job_name(run: str) -> str:
    """The name of a run as clusters allow it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"z2a-{run}".lower())[:50].strip("-")


@dataclass(frozen=True)
class ClusterJob:
    """A run as a cluster starts it."""

    name: str
    command: Sequence[str]
    """What every machine runs."""
    nodes: tuple[int, int]
    """The least and the most machines."""
    gpus: int
    """Of each machine."""
    save_seconds: int
    """Time to save before the job is ended."""

    @property
    def node_words(self) -> str:
        """The machines, as `--nodes` takes them."""
        least, most = self.nodes
        return str(most) if least == most else f"{least}:{most}"


def slurm_file(
    job: ClusterJob, folder: str, time: str, restarts: int, partition: str | None = None, account: str | None = None
) -> str:
    """An sbatch file that runs the command on each machine. It goes back to the queue at most `restarts` times in a row
    because machines were missing."""
    gpu_line = f"#SBATCH --gpus-per-node={job.gpus}\n" if job.gpus else ""
    asked = (("partition", partition), ("account", account))
    asked_lines = "".join(f"#SBATCH --{flag}={value}\n" for flag, value in asked if value)
    keep_lines = "# A lost machine does not end the job: the run goes on with the others.\n#SBATCH --no-kill\n"
    return f"""\
#!/bin/bash
# Written by `z2a launch slurm`. Submit it with: sbatch FILE
#SBATCH --job-name={job.name}
{asked_lines}\
#SBATCH --nodes={job.nodes[1]}
# One task per machine: z2a starts one process per GPU itself.
#SBATCH --ntasks-per-node=1
{gpu_line}# The whole machine with all of its memory: the processes share it.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={time}
# SIGTERM to every machine {job.save_seconds} s before the time is over: the run saves and ends with code 10.
#SBATCH --signal=TERM@{job.save_seconds}
{keep_lines if job.nodes[0] < job.nodes[1] else ""}# Start again when too few machines are left; the run continues.
#SBATCH --requeue
# All attempts write to one log.
#SBATCH --open-mode=append
#SBATCH --output={job.name}-%j.log

{_slurm_script(job, folder, restarts)}"""


def _slurm_script(job: ClusterJob, folder: str, restarts: int) -> str:
    node_flags = ""
    if job.nodes[1] > 1:
        node_flags = f' \\\n            --nodes {job.node_words} --node-rank "$1" --rendezvous "${{machines[0]}}:$port"'
    final = "|".join(map(str, (0, PreemptedError.exit_code, *NEVER_AGAIN)))
    return f"""\
cd {shlex.quote(folder)} || exit 3
# Only who knows the secret of the run can join it. It is in a file beside the run, which all machines share.
machines=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
# Two jobs that share a machine get different ports.
port=$(({SLURM_PORTS.start} + SLURM_JOB_ID % {len(SLURM_PORTS)}))

# A step per machine, so that one can end and begin again without the others: it joins the run at its next save.
# --cpu-bind=none: without it Slurm may give the task, and so all processes, one core.
run_machine() {{
    while true; do
        srun --nodes=1 --ntasks=1 --nodelist="$2" --cpu-bind=none {shlex.join(job.command)}{node_flags}
        code=$?
        case $code in
            {final}) return $code ;; # done, saved, or an error that would come again
        esac
        [ "$1" = 0 ] && [ $code = 1 ] && return 1 # the machines that the run needs did not come back
        sleep 10                                  # this machine is down, or its command was killed
    done
}}
for number in "${{!machines[@]}}"; do
    run_machine "$number" "${{machines[$number]}}" &
    loops[$number]=$!
done
wait "${{loops[0]}}" # machine 0 knows how the run ended, and tells the others
code=$?
sleep 5
kill "${{loops[@]:1}}" 2>/dev/null
# Saved because the time was over: back to the queue. Too few machines are left (code 1): back, too, but at most
# {restarts} times in a row (resilience.restarts), so that a job that can never run ends. Slurm counts all returns;
# the file keeps how many there were when the run last saved. Any other code is final.
count=${{SLURM_RESTART_COUNT:-0}} saved=0
[ -f "{job.name}-$SLURM_JOB_ID.saved" ] && saved=$(cat "{job.name}-$SLURM_JOB_ID.saved")
if [ "$code" = {PreemptedError.exit_code} ]; then
    echo $((count + 1)) >"{job.name}-$SLURM_JOB_ID.saved"
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" = 1 ] && [ $((count - saved)) -lt {restarts} ]; then
    scontrol requeue "$SLURM_JOB_ID"
elif [ "$code" = 1 ]; then
    echo "machines were missing $((count - saved + 1)) times in a row: not started again (resilience.restarts)" >&2
fi
exit "$code"
"""


def slurm_seconds(text: str) -> float:
    """A time limit as Slurm reads it, in seconds (inf: none); ValueError where it is none."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return float("inf")
    days, dash, rest = text.rpartition("-")
    found = re.fullmatch(r"(\d+)(?::(\d+))?(?::(\d+))?", rest, re.ASCII)
    if not found or (dash and not re.fullmatch(r"\d+", days, re.ASCII)):
        raise ValueError(text)
    numbers = [int(number) for number in found.groups() if number]
    if not dash and len(numbers) < 3:  # minutes come first, else hours
        numbers.insert(0, 0)
    hours, minutes, seconds = (*numbers, 0, 0)[:3]
    return 86400 * int(days or 0) + 3600 * hours + 60 * minutes + seconds or float("inf")


def kubernetes_file(job: ClusterJob, image: str, claim: str) -> str:
    """A JobSet (jobset.sigs.k8s.io, 0.6 or newer) with one pod per machine, and a new secret for them."""
    secret_object = ""
    if job.nodes[1] > 1:
        secret_object = f"""\
# Who knows this secret can join the run: keep the file to yourself.
{{apiVersion: v1, kind: Secret, metadata: {{name: {job.name}}}, stringData: {{secret: {json.dumps(new_secret())}}}}}
---
"""
    final, per_pod, spare_lines, alone_lines = list(NEVER_AGAIN), "", "", ""
    if job.nodes[0] < job.nodes[1]:  # a machine that the health check has left out fails alone: Kubernetes 1.29
        final.remove(UnhealthyError.exit_code)
        per_pod = "PerIndex"
        spare_lines = (
            f"          maxFailedIndexes: {job.nodes[1] - job.nodes[0]} # more, and too few machines are left\n"
        )
        alone_lines = f"""\
              - action: FailIndex # a bad machine: the run goes on without it
                onExitCodes: {{containerName: z2a, operator: In, values: [{UnhealthyError.exit_code}]}}
"""
    return f"""\
# Written by `z2a launch kubernetes`. Start it with: kubectl apply -f FILE
# It needs the JobSet controller, for the names of the pods.
{secret_object}apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  network:
    enableDNSHostnames: true # pods find machine 0 by its name
    publishNotReadyAddresses: true # also before it is ready
  failurePolicy:
    maxRestarts: 0 # a pod that fails is replaced alone, below
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed # each pod gets a number, which is its --node-rank
          completions: {job.nodes[1]}
          parallelism: {job.nodes[1]}
          backoffLimit{per_pod}: 1000 # a pod that failed, or whose machine is lost, is started again: it joins the run
{spare_lines}          podFailurePolicy:
            rules:
              - action: Ignore # its machine was drained: not counted
                onPodConditions: [{{type: DisruptionTarget}}]
              - action: FailJob # a wrong config or bad data: another attempt would end alike
                onExitCodes:
                  containerName: z2a
                  operator: In
                  values: {final}
{alone_lines}\
          template:
            spec:
              restartPolicy: Never # as backoffLimit and podFailurePolicy require
              terminationGracePeriodSeconds: {job.save_seconds} # after SIGTERM the run finishes its step and saves
{_pod(job, image, claim)}"""


def _pod(job: ClusterJob, image: str, claim: str) -> str:
    """The container of a machine and its volumes."""
    node_flags, secret_lines = [], ""
    if job.nodes[1] > 1:
        # The name of a pod that was replaced leads to the old one for a while: machine 0 need not ask for its own.
        node_flags = ["--nodes", job.node_words, "--node-rank", "$(NODE_RANK)"]
        node_flags += ["--rendezvous", f"{job.name}-node-0-0.{job.name}:{DEFAULT_PORT}"]
        node_flags += ["--rendezvous-bind", f"[$(POD_IP)]:{DEFAULT_PORT}"]
        secret_lines = f"""\
                    - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
                    - {{name: {VARIABLE}, valueFrom: {{secretKeyRef: {{name: {job.name}, key: secret}}}}}}
"""
    words = "\n".join(f"                  - {json.dumps(word)}" for word in (*job.command, *node_flags))
    limits = f'                  resources:\n                    limits: {{"nvidia.com/gpu": {job.gpus}}}\n'
    gpu_lines = limits if job.gpus else ""
    return f"""\
              containers:
                - name: z2a
                  image: {json.dumps(image)}
                  workingDir: {MOUNT}
                  command:
{words}
                  env:
                    - name: NODE_RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
{secret_lines}\
                  ports:
                    - containerPort: {DEFAULT_PORT} # machine 0 waits here; gloo and NCCL use more ports
{gpu_lines}                  volumeMounts:
                    - {{name: work, mountPath: {MOUNT}}}
                    - {{name: shm, mountPath: /dev/shm}}
              volumes:
                - name: work # every pod reads the data and writes its part of the checkpoints: ReadWriteMany
                  persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}
                - name: shm # NCCL and the readers need more than the usual 64 MB
                  emptyDir: {{medium: Memory}}
"""
