"""Hugging Face's Trainer with checkpoints in memory: run it, kill it, run it again.

    python examples/memory_hugging_face.py runs/trainer

Needs transformers and accelerate.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from zero2all.resilience import MemoryCheckpoint, memory_callback, memory_folder

STEPS = 12


class Kill(TrainerCallback):
    """For a test."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_parts: Any) -> None:
        """In the middle of a run."""
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def main(run: str, ram: str | None = None, kill_after: int | None = None) -> None:
    """Train; `kill_after` a step, for a test."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, attention_dropout=0.1))
    ids = torch.randint(0, 64, (96, 16))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "save_strategy": "no"}
    arguments = TrainingArguments(output_dir=run, report_to=[], use_cpu=True, disable_tqdm=True, **settings)
    memory = MemoryCheckpoint(run, ram)
    callbacks = [memory_callback(memory, every_steps=1), *([Kill(kill_after)] if kill_after else [])]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    with tempfile.TemporaryDirectory() as folder:
        trainer.train(resume_from_checkpoint=memory_folder(memory, folder))
    memory.remove()
    bits = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print(f"weights {hashlib.sha256(bits).hexdigest()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None, int(sys.argv[3]) if len(sys.argv) > 3 else None)
