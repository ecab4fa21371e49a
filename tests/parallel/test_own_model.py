"""The script for a model of one's own in docs/parallel.md is plain torch to 1e-9, over ranks and over a stop."""

import os
import re
import subprocess
import sys

import pytest
import torch

from tests.pages import ROOT

STEPS = 20


def plain_losses():
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32)) for _ in range(4)]
    model = torch.nn.Sequential(*blocks).double()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step), dtype=torch.double)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_the_script_of_the_page_gives_the_losses_of_plain_torch(tmp_path):
    scripts = [re.search(r"```python\n(import os, sys\n.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)[1]
               for page in ("parallel.md", "parallel.zh.md")]  # fmt: skip
    assert scripts[0] == scripts[1]
    (tmp_path / "own.py").write_text(scripts[0])
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    losses = []
    for ranks, steps in (("2", "10"), ("2", str(STEPS))):
        command = [*words, ranks, tmp_path / "own.py", steps, tmp_path / "checkpoint"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        losses += [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert losses == pytest.approx(plain_losses(), rel=1e-9)
