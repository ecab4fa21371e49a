"""Checks, before a model is loaded, that everything `z2a eval` needs is there; names all that is missing at once.

Loading still checks that the parts fit together. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero2all.common.errors import BadInputError
from zero2all.common.manifest import read_manifest
from zero2all.common.records import corpus_sources
from zero2all.common.workspace import Workspace
from zero2all.evals.options import EvalOptions
from zero2all.evals.pair_file import read_pairs
from zero2all.evals.probe_file import read_probes
from zero2all.evals.text_files import text_files
from zero2all.train.checkpoints.layout import require_checkpoint


def check_inputs(
    workspace: Workspace, name: str, step: int | None, options: EvalOptions, is_coming: bool = False
) -> None:
    """Raise one error that names everything an evaluation of this run would miss; with `is_coming` it need not have a
    checkpoint yet."""
    if is_coming:
        problems = _problems_of(lambda: workspace.existing_run(name))
    else:
        problems = _problems_of(lambda: require_checkpoint(workspace.existing_run(name), step))
    problems += _problems_of(lambda: read_manifest(workspace.tokenizer, "tokenizer", "z2a tokenizer train"))
    problems += _problems_of(lambda: _check_corpus(workspace.corpus, options))
    if options.probes is not None:
        problems += _problems_of(lambda: read_probes(options.probes or Path()))
    if options.pairs is not None:
        problems += _problems_of(lambda: read_pairs(options.pairs or Path()))
    problems += _problems_of(lambda: text_files(options.texts))
    if options.tasks is not None:
        problems += _problems_of(options.tasks.read)
    if len(problems) == 1:
        raise BadInputError(problems[0])
    if problems:
        lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))
        raise BadInputError(f"{name} cannot be evaluated. Problems found: {len(problems)}.\n{lines}")


def _problems_of(check: Callable[[], Any]) -> list[str]:
    try:
        check()
    except BadInputError as error:
        return [str(error)]
    return []


def _check_corpus(corpus: Path, options: EvalOptions) -> None:
    sources = corpus_sources(corpus)
    has_more = options.probes is not None or options.pairs is not None or options.texts or options.tasks
    if not has_more and not options.held_out:
        raise BadInputError(
            "There is nothing to score: with --held-out none, ask --probes, --pairs, --tasks or a --text."
        )
    if not has_more and not any(manifest["report"]["valid_records"] for manifest in sources.values()):
        raise BadInputError(
            f"The corpus in {corpus} has no held-out text, so there is nothing to score. Build it with a larger "
            f"--valid-share, or from more documents (a source of fewer than 20 holds none out), or ask --probes, "
            f"or score a --text."
        )
