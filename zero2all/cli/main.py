"""The entry point: all verbs, and one way to end a command that went wrong."""

from __future__ import annotations

import argparse
import errno
import sys

from zero2all import __version__
from zero2all.cli import corpus, evaluate, exchange, pack, quickstart, tokenizer, train
from zero2all.common.errors import DiskError, UsageError, UserError

INTERRUPTED = 130


def main(words: list[str] | None = None) -> int:
    """Run `z2a WORDS…`; returns the exit code."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    try:
        arguments.overrides = _only_overrides(rest, arguments)
        return arguments.handler(arguments) or 0
    except UserError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted. What was finished is kept; run the same command again to continue.", INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; nothing is left to say
        return 0
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            place = f" while writing {error.filename}" if error.filename else ""
            return _fail(
                f"the disk is full{place} ({error.strerror}). Nothing half-written was kept; free some space and run "
                f"the same command again to continue.",
                DiskError.exit_code,
            )
        raise


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="z2a",
        description="From raw text to a language model of your own.",
        epilog="start here:\n  z2a quickstart\n\nhelp of a verb, with an example:\n  z2a train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"z2a {__version__}")
    parser.set_defaults(takes_overrides=False)
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for stage in (quickstart, corpus, tokenizer, pack, train, evaluate, exchange):
        stage.register(verbs)
    return parser


def _only_overrides(rest: list[str], arguments: argparse.Namespace) -> list[str]:
    """What argparse did not know: config overrides where the verb takes them, otherwise a mistake."""
    if not rest or arguments.takes_overrides:
        return rest
    raise UsageError(f"z2a does not know {rest[0]!r} here. Its flags and an example: add --help.")


def _fail(message: str, code: int) -> int:
    print(f"z2a: {message}", file=sys.stderr)
    return code
