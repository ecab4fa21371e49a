"""A plain PyTorch loop that survives `kill -9`: run it, kill it, run it again.

    python examples/memory_plain.py runs/plain

Every step the whole state goes to memory; the next start continues from it with the same bits.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from zero2all.resilience import MemoryCheckpoint

STEPS = 30


def main(run: str, ram: str | None = None, kill_after: int | None = None) -> None:
    """Train; `kill_after` a step, for a test."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    first, memory = 0, MemoryCheckpoint(run, ram)
    found = memory.load()
    if found is not None:
        first, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        print(f"continued at step {first}")
    for step in range(first + 1, STEPS + 1):
        inputs = torch.randn(32, 8)
        loss = (model(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        memory.save(step, state)
        if step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    memory.remove()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, int(sys.argv[3]) if len(sys.argv) > 3 else None)
