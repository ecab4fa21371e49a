"""What weights in 8 and 4 bits cost a trained model: bits per byte, and how far its distributions move.

    python benchmarks/rounded.py RUN --work WORKSPACE --tokens 16384

A model's matrices are replaced by what their rounded forms stand for, and held-out text is scored in float32. Bits per
byte lost hold chance: a rounded model may even be better at a text. The mean of KL(plain || rounded) over its tokens
does not, so groups are chosen by it.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

from benchmarks.machine import save_result
from zero2all.common.progress import say, show_log
from zero2all.common.records import corpus_sources, iter_records, text_template, training_text
from zero2all.common.workspace import Workspace
from zero2all.infer import weights as stored_weights
from zero2all.infer.load import LoadedModel, load_model
from zero2all.infer.weights import int4_weight, int8_weight
from zero2all.model.z2all import Z2all

Round = Callable[[Tensor], Tensor]


def rounded(model: Z2all, matrices: Round, head: Round) -> Z2all:
    """A copy with its matrices rounded, the gains of norms first multiplied in."""
    found = copy.deepcopy(model)
    blocks: list[Any] = list(found.blocks)
    for block in blocks:
        pairs: list[Any] = [(block.attention.qkv, block.attention_norm), (block.attention.out, None)]
        pairs += [(block.feed_forward.gate_up_pairs, block.feed_forward_norm), (block.feed_forward.down, None)]
        for linear, norm in pairs:
            gain = 1.0 if norm is None else norm.weight.data.clone()
            linear.weight.data = matrices(linear.weight.data * gain)
            if norm is not None:
                norm.weight.data.fill_(1.0)
    assert found.head is not None, "the model has a tied head: its embedding would be rounded, too"
    found.head.weight = nn.Parameter(head(found.head.weight.data))
    return found


def held_out(loaded: LoadedModel, work: Workspace, tokens: int) -> tuple[Tensor, int]:
    """Windows of held-out text (N, T), and their bytes."""
    ids: list[int] = []
    for source, manifest in corpus_sources(work.corpus).items():
        template = text_template(manifest)
        for record in iter_records(work.corpus, source, "valid"):
            ids += loaded.tokenizer.encode_text(training_text(record, template))
            if len(ids) >= tokens:
                break
    windows = torch.tensor(ids[: len(ids) // loaded.window * loaded.window]).view(-1, loaded.window)
    return windows, sum(len(loaded.tokenizer.token_bytes(each)) for each in windows[:, 1:].flatten().tolist())


@torch.no_grad()
def distributions(model: Z2all, windows: Tensor) -> Tensor:
    """log P of all ids after each token but the last (N, T - 1, V)."""
    return torch.cat([model.logits(model(row[None]))[:, :-1].log_softmax(dim=-1) for row in windows])


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--work", type=Path, default=Path())
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args()
    stored_weights._has_int4_cpu_kernel = lambda: False  # type: ignore[assignment]  # its form cannot be widened
    loaded = load_model(given.run, Workspace(given.work), None, "cpu", "float32")
    windows, size = held_out(loaded, Workspace(given.work), given.tokens)
    plain = distributions(loaded.model, windows)
    targets = windows[:, 1:].unsqueeze(-1)
    least = -float(plain.gather(-1, targets).double().sum()) / 0.6931471805599453 / size
    say(f"{loaded.parameters:,} parameters, {windows.numel():,} tokens, {size:,} bytes: {least:.4f} bits per byte")
    in_8_bits: Round = lambda matrix: int8_weight(matrix).widened()  # noqa: E731
    cases: dict[str, tuple[Round, Round]] = {"int8": (in_8_bits, in_8_bits)}
    for group in (32, 64, 128):
        in_4_bits: Round = lambda matrix, group=group: int4_weight(matrix, group).widened()  # type: ignore[misc,union-attr]  # noqa: E731
        cases[f"int4, groups of {group}"] = (in_4_bits, in_8_bits)
        cases[f"int4, groups of {group}, head too"] = (in_4_bits, in_4_bits)
    rows: dict[str, Any] = {"parameters": loaded.parameters, "tokens": windows.numel(), "bits_per_byte": least}
    for name, how in cases.items():
        found = distributions(rounded(loaded.model, *how), windows)
        lost = -float(found.gather(-1, targets).double().sum()) / 0.6931471805599453 / size - least
        divergence = float((plain.exp() * (plain - found)).sum(dim=-1).double().mean())
        rows[name] = {"bits_per_byte_lost": lost, "divergence_nats": divergence}
        say(f"{name:32}{lost:+9.5f} bits per byte, KL {divergence:.5f} nats a token")
    save_result("rounded", rows)


if __name__ == "__main__":
    show_log()
    main()
