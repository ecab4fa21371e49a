"""`z2a serve`: a model behind an OpenAI-compatible endpoint, with a page to talk to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from zero2all.cli.model import add_model, load
from zero2all.cli.verb import Subparsers, add_address, add_flags, add_verb, real, whole
from zero2all.common.errors import BadInputError
from zero2all.common.language import translate as t

if TYPE_CHECKING:
    from zero2all.serve.server import ModelServer

SHORTEST_TOKEN = 16


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    serve = add_verb(
        verbs,
        "serve",
        "serve a model: an OpenAI-compatible API, and a page to talk to it",
        "z2a serve my-run --work my-workspace --open\n  z2a serve path/to/huggingface-folder --port 8000",
        _serve,
    )
    add_model(serve)
    serve.add_argument("--name", metavar="NAME", help="name of the model for clients (default: the name of the run)")
    _add_engine(serve)
    token_file = ("--token-file FILE", Path, None, "read the token from this file, so that it stays the same")
    add_address(serve, "port (default: the first free one from 6107)", token_file)
    grace = "how long running requests may continue after Ctrl-C or SIGTERM (default 30)"
    add_flags(serve, ("--grace SECONDS", real(0), 30.0, grace), ("--open", bool, False, "open the page in the browser"))


def _add_engine(serve: argparse.ArgumentParser) -> None:
    add_flags(
        serve,
        ("--max-len N", whole(2), None, "tokens of prompt and answer together (default: the model's)"),
        ("--max-batch N", whole(1), None, "answers generated at once (default: 32 on a CPU, 256 on a GPU)"),
        ("--max-waiting N", whole(1), 256, "requests that may wait; further ones are refused with 429 (default 256)"),
        ("--cache-gb X", real(0), None, "memory for keys and values in GB (default: depends on the free memory)"),
    )


def _serve(arguments: argparse.Namespace) -> None:
    token = _token_in(arguments.token_file) if arguments.token_file else None

    from zero2all.infer.engine import EngineSettings
    from zero2all.serve.model import ServedModel
    from zero2all.serve.server import ModelServer, ServeOptions

    cache_bytes = None if arguments.cache_gb is None else int(arguments.cache_gb * 1e9)
    settings = EngineSettings(arguments.max_batch, cache_bytes, arguments.max_len, int8=arguments.int8, owns_model=True)
    model = ServedModel(lambda: load(arguments), settings, arguments.name, arguments.max_waiting)
    options = ServeOptions(
        arguments.host, arguments.port, arguments.token, token, arguments.allow_host, arguments.grace
    )
    server = ModelServer(model, options, lambda: _say_ready(server, arguments))
    print(t(f"Loading {arguments.model} …"), flush=True)
    server.serve()


def _say_ready(server: ModelServer, arguments: argparse.Namespace) -> None:
    facts = server.model.facts()
    z2a = facts["z2a"]
    print(t(f"{facts['id']}: {z2a['parameters'] / 1e6:,.1f} M parameters, {z2a['dtype']}, {z2a['device']}"))
    if (arguments.max_len or 0) > z2a["max_len"]:
        print(
            t(f"--max-len {arguments.max_len} is reduced to {z2a['max_len']}, the model's maximum (model.max_seq_len)")
        )
    key = f", api_key={server.token}" if server.token else t(", any api_key")
    print(t(f"The page is at {server.page}   (Ctrl-C ends it)"))
    print(t(f"OpenAI clients: base_url={server.url}v1{key}, model={facts['id']}"), flush=True)
    if arguments.open:
        import webbrowser

        webbrowser.open(server.page)


def _token_in(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"The token in {path} cannot be read ({error}). Give a file with one line of text."
        ) from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInputError(
            f"The token in {path} must have at least {SHORTEST_TOKEN} printable ASCII characters "
            f"without spaces, on one line. `openssl rand -hex 24 > {path}` makes a good one."
        )
    return token
