"""A run's folder as the trainer would have written it, with times, memory and faults that a test chooses."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """
model: {vocab_size: 200, hidden_size: 32, intermediate_size: 64, layers: 1, heads: 4, kv_heads: 2, max_seq_len: 64}
data: {seq_len: 32, packing: %(packing)s}
train: {tokens_per_step: 512, micro_batch_samples: %(micro)s, recompute: %(recompute)s, name: %(name)s}
"""
PARTS = {"forward": 0.2, "loss": 0.1, "backward": 0.5, "reduce": 0.05, "optimizer": 0.04, "data_wait": 0.01}
PARTS |= {"other": 0.1}
GIB = 2**30


@dataclass
class MadeRun:
    """Steps of one second each, unless `parts` say otherwise."""

    folder: Path
    parts: dict[str, float] = field(default_factory=lambda: dict(PARTS))
    device: str = "NVIDIA H200"
    config: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # further values of every row
    card_gib: float | None = 140.0
    loss_shift: float = 0.0
    noise: float = 0.01
    evaluate_every: int = 0  # takes 3 s
    save_every: int = 0  # stalls 0.5 s
    slowdown: float = 0.0  # of the last step against the first, evenly in between
    seed: int = 0
    now: float = 1_000_000.0
    attempt: int = 0

    def write(self, first: int, last: int, end: str | None = "done", resumed_from: int | None = None) -> "MadeRun":
        """One attempt with the steps from `first` to `last`; it starts 5 s before its first step."""
        self.attempt += 1
        (self.folder / "metrics").mkdir(parents=True, exist_ok=True)
        values = {"packing": "concat", "micro": 4, "recompute": "none", "name": self.folder.name} | self.config
        (self.folder / "config.yaml").write_text(CONFIG % values)
        random = np.random.default_rng(self.seed)
        lines: list[dict[str, Any]] = []
        started = self.now
        self.now += 5.0
        environment = {"torch": "2.13.0", "device": self.device, "processes": 1}
        notes = ["ops: attention=sdpa, optimizer=fused"]
        start: dict[str, Any] = {"notes": notes, "environment": environment}
        if self.card_gib is not None:
            start["memory_bytes"] = self.card_gib * GIB
        header = {"writer": "train", "attempt": self.attempt, "process_start": started, "resumed_from": resumed_from}
        lines += [self.event(first - 1, "segment", header | {"format": 1}), self.event(first - 1, "start", start)]
        for step in range(first, last + 1):
            slower = 1.0 + self.slowdown * (step - first) / max(1, last - first) + self.noise * random.standard_normal()
            parts = {f"time/{name}": seconds * slower for name, seconds in self.parts.items()}
            seconds = sum(parts.values())
            self.now += seconds
            loss = 5.0 - 0.02 * step + 0.1 * np.sin(step) + self.loss_shift + 0.01 * random.standard_normal()
            row = {"loss": loss, "tokens_per_second": 512 / seconds, "time/step": seconds, **parts, **self.metrics}
            lines.append({"step": step, "time": self.now, "tokens": 512 * step, "values": row})
            if self.evaluate_every and step % self.evaluate_every == 0:
                self.now += 3.0
                row = {"eval/valid/loss/en": 4.0 + self.loss_shift}
                lines.append({"step": step, "time": self.now, "tokens": 512 * step, "values": row})
            if self.save_every and step % self.save_every == 0:
                self.now += 0.5
                lines.append(self.event(step, "checkpoint", {"folder": f"step-{step:08}", "stall_seconds": 0.5}))
        if end is not None:
            lines.append(self.event(last, "end", {"reason": end}))
        path = self.folder / "metrics" / f"train-{self.attempt}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self

    def incident(self, kind: str, waited_seconds: float = 0.0) -> "MadeRun":
        """What the supervisor writes when it ends an attempt, before it starts the next."""
        row = self.event(0, "incident", {"kind": kind, "waited_seconds": waited_seconds})
        with open(self.folder / "metrics" / "supervisor-1.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        return self

    def rewrite(self, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> "MadeRun":
        """Other lines in the place of those of the first attempt."""
        path = self.folder / "metrics/train-1.jsonl"
        lines = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self

    def event(self, step: int, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        return {"step": step, "time": self.now, "kind": kind, "data": data}
