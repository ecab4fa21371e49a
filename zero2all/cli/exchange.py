"""`z2a export` and `z2a import`."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.runs import STEP, add_run_name
from zero2all.cli.verb import Subparsers, add_flags, add_output, add_verb, add_work, workspace_of
from zero2all.common.language import translate as t


def register(verbs: Subparsers) -> None:
    """Add the verbs."""
    export = add_verb(
        verbs,
        "export",
        "write a run as a Hugging Face folder",
        "z2a export my-run --work my-workspace --to my-model-hf",
        _export,
    )
    add_run_name(export)
    add_output(export, "--to", is_folder=True, required=True, help="folder to write, new or empty")
    dtype = "dtype of the weights (default: that of an imported model, else float32)"
    add_flags(
        export,
        STEP,
        ("--dtype", ("float32", "bfloat16", "float16"), None, dtype),
    )

    export.add_argument(
        "--tokenizer",
        dest="tokenizer_layout",
        choices=("safe", "compatible"),
        default="safe",
        help="safe (default): text can never become a control token; compatible: ordinary added tokens "
        "and a chat template, for tools that render chats as text",
    )

    parser = add_verb(
        verbs,
        "import",
        "start a run from a Hugging Face Llama or Qwen2 folder",
        "z2a import path/to/hf-folder --work my-workspace --name continued",
        _import,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder, on this machine")
    add_work(parser)
    parser.add_argument("--name", required=True, help="name of the new run")
    add_flags(
        parser,
        ("--tokenizer DIR", Path, None, "use this extension of its tokenizer (made with z2a tokenizer extend)"),
        ("--resize-embeddings", bool, False, "give the model an embedding row for every token id"),
    )


def _export(arguments: argparse.Namespace) -> None:
    from zero2all.exchange import export_run, require_new
    from zero2all.infer.load import load_run

    require_new(arguments.to)
    workspace = workspace_of(arguments)
    loaded = load_run(workspace, arguments.run, arguments.step)
    export_run(loaded, workspace.tokenizer, arguments.to, arguments.dtype, arguments.tokenizer_layout)
    print(t(f"{arguments.to}: {loaded.name} at step {loaded.step}, for transformers.AutoModelForCausalLM"))


def _import(arguments: argparse.Namespace) -> None:
    from zero2all.common.workspace import Workspace
    from zero2all.exchange import import_folder

    done = import_folder(
        arguments.folder, Workspace(arguments.work), arguments.name, arguments.tokenizer, arguments.resize_embeddings
    )
    if done.resized is not None:
        rows = done.resized
        print(
            t(
                f"embeddings: {rows.rows_before:,} rows before, {rows.rows:,} now; {rows.new_ids:,} new "
                f"ids, each initialised with the mean of its old pieces ({rows.mean_pieces:.1f} on average)"
            )
        )
    run = done.run
    print(t(f"{run}: ready at step 0. Check its config.yaml, pack your data with its tokenizer, then train it:"))
    print(f"  z2a train {run / 'config.yaml'} --work {arguments.work}")
