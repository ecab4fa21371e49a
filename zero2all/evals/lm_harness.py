"""Our checkpoints in the standard harness (lm-eval; the extra `lmeval`).

The harness asks for log P(continuation | context) of texts, for log P(text), and for text to be written. All three go
to the engine at once, which makes its own batches and computes what requests have in common only once. Where a token
spans the border of context and continuation, the harness gets the exact value (see `scorer`), not the one that its own
way of cutting tokens would give; `border_spans` counts them.

Only for Python's that have lm-eval: `require_lm_eval` says how to get it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import table_lines
from zero2all.common.language import translate as t
from zero2all.common.progress import progress
from zero2all.evals.scorer import Question, score_questions
from zero2all.infer.boundary import opening_id
from zero2all.infer.engine import Engine
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest, complete_all

if TYPE_CHECKING or find_spec("lm_eval"):
    from lm_eval.api.model import TemplateLM
else:
    TemplateLM = object

QUESTIONS_AT_ONCE = 4096
"""Questions whose tokens are held at once."""
DEFAULT_NEW_TOKENS = 256
"""What a task that does not say how much may be written gets, as in lm-eval's own models."""


def require_lm_eval() -> None:
    """An error that says how to get the library, where it is missing; before any work."""
    if find_spec("lm_eval") is None:
        raise UsageError(
            "The standard harness is the package lm-eval, which is not installed: pip install 'zero2all[lmeval]'. "
            "`z2a eval RUN --tasks …` needs no harness."
        )


class HarnessModel(TemplateLM):
    """A model in our engine, as lm-eval wants it. One process: rank 0 of 1."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self._device = engine.device
        self.border_spans = 0
        """Requests where a token spans the border, or that share their context with one."""
        self.cut = 0
        """Requests that were longer than the model's context, and lost their beginning, as lm-eval does it."""
        self.empty = 0
        """Requests with an empty continuation: its probability is 1."""

    # What TemplateLM asks for ----------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.engine.tokenizer.end_id

    @property
    def prefix_token_id(self) -> int:
        """The id before the first token of a document."""
        return opening_id(self.engine.tokenizer)

    @property
    def max_length(self) -> int:
        """Tokens that the model takes."""
        return self.engine.max_len

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in lm-eval's cache of requests."""
        return f"zero2all-{self.engine.tokenizer.fingerprint}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text, after the one that begins a document unless told otherwise."""
        del kwargs
        ids = self.engine.tokenizer.encode_text(string)
        return ids if add_special_tokens is False else [self.prefix_token_id, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """log P(continuation ids | context ids) and whether it is the greedy one; what is too long loses its
        beginning."""
        del kwargs
        rows = [[*context, *continuation][-(self.max_length + 1) :] for _, context, continuation in requests]
        starts = [max(1, len(row) - len(request[2])) for row, request in zip(rows, requests, strict=True)]
        return [(sum(each.logprobs), not any(each.ranks)) for each in self.engine.score(rows, starts)]

    # The three kinds of requests -------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """log P(continuation | context), exact also where a token spans the border, and whether it is the greedy
        one."""
        questions = _by_context(_spaces_moved(*request.args) for request in requests)
        found: list[tuple[float, bool]] = []
        with progress("log-likelihoods", len(questions), "question", quiet=disable_tqdm) as bar:
            for first in range(0, len(questions), QUESTIONS_AT_ONCE):
                group = questions[first : first + QUESTIONS_AT_ONCE]
                for question, scored in zip(group, score_questions(self.engine, group, bar), strict=True):
                    if isinstance(scored, str):
                        found += [self._unusual(question.prompt, each) for each in question.continuations]
                    else:
                        found += [(each.logprob, each.is_greedy) for each in scored]
                        self.border_spans += sum(each.spans_border for each in scored)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """log P(text) of each whole text, from the beginning of a document on. What is longer than the context is
        scored in windows, each token once, the last window with a full context."""
        del disable_tqdm
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[tuple[Any, list[int], list[int]]] = []
        owners = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to one of its stop strings."""
        asked = [self._to_write(*request.args) for request in requests]
        with progress("texts", len(requests), "request", quiet=disable_tqdm) as bar:
            written = complete_all(self.engine, asked, bar)
        for request, text in zip(requests, written, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return written

    # Their parts -----------------------------------------------------------------------------------------------------

    def _unusual(self, context: str, continuation: str) -> tuple[float, bool]:
        """One continuation of a question that cannot be scored whole."""
        if not continuation:
            self.empty += 1
            return 0.0, True
        whole, before = self.tok_encode(context + continuation), self.tok_encode(context)
        self.cut += len(whole) > self.max_length + 1
        border = min(len(before), len(whole) - 1)
        return self._loglikelihood_tokens([(None, whole[:border], whole[border:])])[0]

    def _to_write(self, context: str, settings: dict[str, Any]) -> TextRequest:
        most = min(_most_new_tokens(settings), self.max_length - 1)
        stops = settings.get("until") or ()
        ids = self.tok_encode(context)
        room = self.max_length - most
        self.cut += len(ids) > room
        return TextRequest(
            prompt=context if len(ids) <= room else ids[-room:],
            max_new_tokens=most,
            sampling=_sampling(settings),
            stop=(stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop),
        )


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """White space at the end of the context is scored with the continuation: lm-eval's rule for all its models."""
    bare = context.rstrip()
    return bare, context[len(bare) :] + continuation


def _by_context(pairs: Iterable[tuple[str, str]]) -> list[Question]:
    """Neighbours with the same context are one question; those without a context are not, for they are not
    alternatives."""
    questions = []
    for context, group in groupby(pairs, key=lambda pair: pair[0]):
        continuations = [continuation for _, continuation in group]
        if context:
            questions.append(Question(context, tuple(continuations)))
        else:
            questions += [Question("", (continuation,)) for continuation in continuations]
    return questions


def _most_new_tokens(settings: dict[str, Any]) -> int:
    for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
        if settings.get(name) is not None:
            return max(1, int(settings[name]))
    return DEFAULT_NEW_TOKENS


def _sampling(settings: dict[str, Any]) -> Sampling:
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") is False:
        temperature = 0.0
    elif settings.get("do_sample") and not temperature:
        temperature = 1.0
    return Sampling(temperature, int(settings.get("top_k") or 0), float(settings.get("top_p") or 1.0))


# The harness itself ---------------------------------------------------------------------------------------------------


def run_harness(
    engine: Engine,
    tasks: Sequence[str],
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Run lm-eval's own tasks, or those of the folder `include`, on a model; returns lm-eval's results and, beside
    them, what was unusual. Without a network, unless HF_DATASETS_OFFLINE=0 is set."""
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # before `datasets` is imported
    from lm_eval import simple_evaluate

    model = HarnessModel(engine)
    found = simple_evaluate(
        model, tasks=list(tasks), task_manager=_tasks_of(tasks, include), num_fewshot=shots, limit=limit,
        bootstrap_iters=100, log_samples=True,
    )  # fmt: skip
    return {
        "results": found["results"],
        "per_item": {task: [_sample(each) for each in samples] for task, samples in found["samples"].items()},
        "higher_is_better": found["higher_is_better"],
        "versions": found["versions"],
        "shots": found["n-shot"],
        "samples": found["n-samples"],
        "border_spans": model.border_spans,
        "cut": model.cut,
        "empty": model.empty,
    }


def _sample(found: dict[str, Any]) -> dict[str, Any]:
    """What the report keeps of an item: its place, what was right, what the model said, and its scores."""
    scores = {name: found[name] for name in found.get("metrics", ()) if isinstance(found.get(name), int | float)}
    return {"id": found["doc_id"], "target": str(found["target"]), "said": _plain(found["filtered_resps"]), **scores}


def _plain(value: Any) -> Any:
    """As JSON can hold it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if isinstance(value, str | int | float) else str(value)


def _tasks_of(names: Sequence[str], include: Path | None) -> Any:
    """lm-eval's index of tasks: only the folder's where it has all of them, since reading all of lm-eval's takes a
    quarter of a minute."""
    from lm_eval.tasks import TaskManager

    if include is not None:
        if not include.is_dir():
            raise BadInputError(f"There is no folder {include} with tasks of lm-eval.")
        own = TaskManager(include_path=str(include), include_defaults=False)
        if all(own.match_tasks([name]) for name in names):
            return own
    manager = TaskManager(include_path=None if include is None else str(include))
    missing = [name for name in names if not manager.match_tasks([name])]
    if missing:
        where = "lm-eval" if include is None else f"lm-eval and {include}"
        raise BadInputError(
            f"There is no task {', '.join(missing)} in {where}. `lm-eval ls tasks` lists lm-eval's own."
        )
    return manager


def harness_lines(found: dict[str, Any]) -> list[str]:
    """The results for a terminal."""
    rows = []
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
                error = values.get(f"{metric}_stderr,{kind}")
                shown = [f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "-"]
                items = found["samples"].get(task, {}).get("effective", "-")
                rows.append([task, metric, *shown, str(items), str(found["shots"].get(task, "-"))])
    lines = table_lines(t("task | metric | value | stderr | items | shots"), rows)
    if found["border_spans"]:
        lines.append(
            f"{found['border_spans']:,} requests whose question has a token across the border of context and "
            f"continuation: scored exactly"
        )
    if found["cut"]:
        lines.append(f"{found['cut']:,} requests were longer than the model's context and lost their beginning")
    if found["empty"]:
        lines.append(f"{found['empty']:,} requests had an empty continuation: its probability is 1")
    return lines
