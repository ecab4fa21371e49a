"""`z2a eval` and `z2a generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.verb import Subparsers, add_verb, add_work, real, whole, workspace_of


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    parser = add_verb(
        verbs,
        "eval",
        "bits per byte per channel on held-out text, and probes",
        "z2a eval my-run --work my-workspace --probes raw/probes.jsonl",
        _eval,
    )
    _add_run(parser)
    parser.add_argument(
        "--probes",
        type=Path,
        default=None,
        metavar="FILE",
        help="questions to ask, one JSON object a line (default: none are asked)",
    )
    parser.add_argument(
        "--max-bytes",
        type=whole(1),
        default=1_000_000,
        metavar="N",
        help="held-out bytes to score per source (default 1000000)",
    )

    generate = add_verb(
        verbs,
        "generate",
        "continue a text",
        'z2a generate my-run --work my-workspace --prompt "中国的首都是"',
        _generate,
    )
    _add_run(generate)
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="the beginning of the text")
    generate.add_argument(
        "--max-new-tokens", type=whole(1), default=100, metavar="N", help="tokens to write at most (default 100)"
    )
    generate.add_argument(
        "--temperature",
        type=real(0),
        default=0.0,
        metavar="X",
        help="0 always takes the likeliest token, 1 draws as the model's own distribution says (default 0)",
    )
    generate.add_argument(
        "--top-p",
        type=real(0, 1),
        default=1.0,
        metavar="X",
        help="draw only among the likeliest tokens that together have this probability (default 1: all)",
    )
    generate.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="another number, another draw (default 0); needs a temperature",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="name of the run")
    add_work(parser)
    parser.add_argument("--step", type=whole(0), metavar="N", help="checkpoint to use (default: the newest)")


def _eval(arguments: argparse.Namespace) -> None:
    from zero2all.evals.inputs import check_inputs

    workspace = workspace_of(arguments)
    check_inputs(workspace, arguments.run, arguments.step, arguments.probes)  # before torch and the weights are loaded

    from zero2all.evals.report import evaluate_run, report_lines
    from zero2all.infer.load import load_run

    loaded = load_run(workspace, arguments.run, arguments.step)
    report = evaluate_run(loaded, workspace, arguments.probes, arguments.max_bytes)
    print("\n".join(report_lines(report)))


def _generate(arguments: argparse.Namespace) -> None:
    import codecs

    from zero2all.evals.generate import Sampling, stream
    from zero2all.infer.load import load_run

    loaded = load_run(workspace_of(arguments), arguments.run, arguments.step)
    sampling = Sampling(arguments.temperature, arguments.top_p, arguments.seed)
    print(arguments.prompt, end="", flush=True)
    whole_characters = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in stream(loaded, arguments.prompt, arguments.max_new_tokens, sampling):
        print(whole_characters.decode(piece), end="", flush=True)
    print(whole_characters.decode(b"", final=True))
