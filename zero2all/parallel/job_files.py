"""Files that start a run on a cluster: a batch file for Slurm, a manifest for Kubernetes. They say why each line is
there, because people will change them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from zero2all.common.errors import PreemptedError
from zero2all.parallel.nodes import DEFAULT_PORT

NEVER_AGAIN = (2, 3, 12, 13, 14)
"""Exit codes that another attempt would end with too: docs/architecture.md."""


def job_name(run: str) -> str:
    """The name of a run as clusters allow it: lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"z2a-{run}".lower())[:50].strip("-")


def slurm_file(
    name: str, command: Sequence[str], folder: str, nodes: int, gpus: int, time: str, save_seconds: int
) -> str:
    """An sbatch file that runs `command` once on each machine."""
    gpu_line = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
    return f"""\
#!/bin/bash
# Written by `z2a launch slurm`. Submit it with: sbatch FILE
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
# One task per machine: z2a starts one process per GPU itself.
#SBATCH --ntasks-per-node=1
{gpu_line}# The whole machine with all of its memory: the processes share it.
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={time}
# SIGTERM to every machine {save_seconds} s before the time is over: the run saves and ends with code 10.
#SBATCH --signal=TERM@{save_seconds}
# Start again when a machine has failed; the run continues from its newest checkpoint.
#SBATCH --requeue
# All attempts write to one log.
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log

cd {shlex.quote(folder)} || exit 3
# Machine 0, its port and the number of each machine come from Slurm's variables.
# --cpu-bind=none: without it Slurm may give the task, and so all processes, one core.
# --kill-on-bad-exit=0: a machine that has saved first must not end the others, which still save.
srun --cpu-bind=none --kill-on-bad-exit=0 {shlex.join(command)}
code=$?
# Saved because the time was over: back to the queue. Any other code is final.
if [ "$code" = {PreemptedError.exit_code} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def kubernetes_file(
    name: str, command: Sequence[str], image: str, claim: str, nodes: int, gpus: int, save_seconds: int
) -> str:
    """A JobSet (jobset.sigs.k8s.io, 0.6 or newer) with one pod per machine."""
    meeting = ["--nodes", str(nodes), "--node-rank", "$(NODE_RANK)"]
    meeting += ["--rendezvous", f"{name}-node-0-0.{name}:{DEFAULT_PORT}"]
    words = "\n".join(f"                  - {json.dumps(word)}" for word in (*command, *meeting))
    gpu_lines = (
        f'                  resources:\n                    limits: {{"nvidia.com/gpu": {gpus}}}\n' if gpus else ""
    )
    return f"""\
# Written by `z2a launch kubernetes`. Start it with: kubectl apply -f FILE
# It needs the JobSet controller, which starts all pods again together when one has failed.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}
spec:
  network:
    enableDNSHostnames: true # pods find machine 0 by its name
    publishNotReadyAddresses: true # also before it is ready
  failurePolicy:
    maxRestarts: 100 # each attempt continues from the newest checkpoint
    rules:
      - action: FailJobSet # a wrong config or bad data: another attempt would end alike
        onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          completionMode: Indexed # each pod gets a number, which is its --node-rank
          completions: {nodes}
          parallelism: {nodes}
          backoffLimit: 0 # one pod alone cannot come back: all start again
          podFailurePolicy:
            rules:
              - action: FailJob
                onExitCodes:
                  containerName: z2a
                  operator: In
                  values: {list(NEVER_AGAIN)}
          template:
            spec:
              restartPolicy: Never # as backoffLimit and podFailurePolicy require
              terminationGracePeriodSeconds: {save_seconds} # after SIGTERM the run finishes its step and saves
              containers:
                - name: z2a
                  image: {json.dumps(image)}
                  workingDir: /workspace
                  command:
{words}
                  env:
                    - name: NODE_RANK
                      valueFrom:
                        fieldRef:
                          fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
                  ports:
                    - containerPort: {DEFAULT_PORT} # machine 0 waits here; gloo and NCCL use more ports
{gpu_lines}                  volumeMounts:
                    - {{name: work, mountPath: /workspace}}
                    - {{name: shm, mountPath: /dev/shm}}
              volumes:
                - name: work # every pod reads the data and writes its part of the checkpoints: ReadWriteMany
                  persistentVolumeClaim: {{claimName: {json.dumps(claim)}}}
                - name: shm # NCCL and the readers need more than the usual 64 MB
                  emptyDir: {{medium: Memory}}
"""
