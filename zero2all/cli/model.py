"""The arguments of verbs that use a trained model: which one, where it computes, and how it chooses tokens."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero2all.cli.runs import add_optional_run
from zero2all.cli.verb import count, real, whole

if TYPE_CHECKING:
    from zero2all.infer.load import LoadedModel
    from zero2all.infer.sampling import Sampling


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model, and how it is loaded."""
    about = "name or folder of a run, or a Hugging Face folder (default: the one run of the workspace)"
    add_optional_run(parser, "model", metavar="RUN|FOLDER", help=about)
    parser.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")
    parser.add_argument(
        "--device", metavar="NAME", help="auto, cpu, cuda or cuda:1 (default auto: a GPU where there is one)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="precision of weights and computation (default: bfloat16 on a GPU, float32 on the CPU)",
    )
    parser.add_argument(
        "--int8", action="store_true", help="keep the weights of linear layers in 8 bits: less memory, slightly worse"
    )


def add_sampling(parser: argparse.ArgumentParser, temperature: float, max_new_tokens: int) -> None:
    """How tokens are chosen, and when a text ends."""
    parser.add_argument(
        "--max-new-tokens",
        type=count,
        default=max_new_tokens,
        metavar="N",
        help=f"most tokens to generate (default {max_new_tokens})",
    )
    parser.add_argument(
        "--temperature",
        type=real(0),
        default=temperature,
        metavar="X",
        help=f"0 always takes the most likely token, 1 samples from the model's distribution (default {temperature:g})",
    )
    parser.add_argument(
        "--top-k",
        type=whole(0),
        default=0,
        metavar="N",
        help="sample only from the N most likely tokens (default 0: all)",
    )
    parser.add_argument(
        "--top-p",
        type=real(0, 1, is_open=True),
        default=1.0,
        metavar="X",
        help="sample only from the most likely tokens that together have this probability (default 1: all)",
    )
    parser.add_argument(
        "--min-p",
        type=real(0, 1),
        default=0.0,
        metavar="X",
        help="sample only from tokens at least X times as likely as the most likely one (default 0: all)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=real(0),
        default=1.0,
        metavar="X",
        help="above 1: tokens that already occurred become less likely (default 1)",
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated"
    )
    parser.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="seed of the sampling (default 0); needs a temperature",
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
    from zero2all.common.workspace import Workspace
    from zero2all.infer.load import load_model

    return load_model(arguments.model, Workspace(arguments.work), arguments.step, arguments.device, arguments.dtype)
