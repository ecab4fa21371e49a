"""What keeps a run alive. In the processes of a run: heartbeat. Outside of them: supervisor, with notice (requests to
stop), diagnosis (what is known about a failure) and page (where that is written).

`beat()` is for scripts under `z2a supervise`.
"""

from zero2all.resilience.heartbeat import beat as beat
