"""Metrics of a run: files that training can always write, and what is made of them.

`MetricsWriter` writes (standard library only); `reader.RunReader` follows a run. The JSON lines in
`runs/<name>/metrics/` are the truth; everything else is derived.

    from zero2all.track import MetricsWriter

    with MetricsWriter(Path("runs/small")) as run:
        run.log({"loss": loss, "lr": 3e-4}, step=step, tokens=tokens)
"""

from zero2all.track.writer import MetricsWriter

__all__ = ["MetricsWriter"]
