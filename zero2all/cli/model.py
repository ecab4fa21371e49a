"""The arguments of verbs that use a trained model: which one, where it computes, and how it chooses tokens."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.runs import STEP, add_optional_run
from zero2all.cli.verb import add_flags, count, real, whole, workspace_of, workspaces_below

if TYPE_CHECKING:
    from zero2all.infer.load import LoadedModel
    from zero2all.infer.sampling import Sampling


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, and how it is loaded."""
    about = "name or folder of a run, or a Hugging Face folder (default: the one run of the workspace)"
    add_optional_run(parser, "model", metavar="RUN|FOLDER", help=about)
    dtype = "precision of weights and computation (default: bfloat16 on a GPU, float32 on the CPU)"
    add_flags(
        parser,
        STEP,
        ("--device NAME", str, None, "auto, cpu, cuda or cuda:1 (default auto: a GPU where there is one)"),
        ("--dtype", ("float32", "bfloat16", "float16"), None, dtype),
        ("--int8", bool, False, "keep the weights of linear layers in 8 bits: less memory, slightly worse"),
    )


def add_sampling(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    """How tokens are chosen, and when a text ends."""
    top_p = "sample only from the most likely tokens that together have this probability (default 1: all)"
    min_p = "sample only from tokens at least X times as likely as the most likely one (default 0: all)"
    repetition_penalty = "above 1: tokens that already occurred become less likely (default 1)"
    about = f"0 always takes the most likely token, 1 samples from the model's distribution (default {temperature:g})"
    add_flags(
        parser,
        ("--max-new-tokens N", count, max_new_tokens, f"most tokens to generate (default {max_new_tokens})"),
        ("--temperature X", real(0), temperature, about),
        ("--top-k N", whole(0), 0, "sample only from the N most likely tokens (default 0: all)"),
        ("--top-p X", real(0, 1, is_open=True), 1.0, top_p),
        ("--min-p X", real(0, 1), 0.0, min_p),
        ("--repetition-penalty X", real(0), 1.0, repetition_penalty),
        ("--stop TEXT", [str], [], "end before this text; may be repeated"),
        ("--seed N", whole(0), 0, "seed of the sampling (default 0); needs a temperature"),
    )


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """How tokens are chosen, as the arguments say."""
    from zero2all.infer.sampling import Sampling

    return Sampling(
        arguments.temperature,
        arguments.top_k,
        arguments.top_p,
        arguments.min_p,
        arguments.repetition_penalty,
        arguments.seed,
    )


def load(arguments: argparse.Namespace) -> LoadedModel:
    """The model that the arguments name."""
    from zero2all.common.workspace import Workspace, is_folder_name
    from zero2all.infer.load import load_model

    is_name = is_folder_name(arguments.model) and not Path(arguments.model).exists()
    if is_name and (arguments.work != Path() or workspaces_below()):
        workspace_of(arguments)  # says which workspaces there are
    return load_model(arguments.model, Workspace(arguments.work), arguments.step, arguments.device, arguments.dtype)
