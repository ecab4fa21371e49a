"""Answers drawn from a model while it is trained, by the engine, and what is learned from each.

Tokens in, tokens out: what the model wrote is never decoded and encoded again. Where it calls a function, the ids of
the result are appended and it goes on; these ids are not learned. A draw depends on the run's seed, the step, the
prompt and the number of the answer, so that a run that is resumed draws the same answers.

The log-probability of each token is kept as it was drawn: at temperature 1 from all ids, so that the trainer, which
computes it again, sees the same distribution.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zero2all.common.errors import UsageError
from zero2all.config.finetune import GrpoConfig
from zero2all.infer.boundary import Vocabulary
from zero2all.infer.cache import BLOCK, block_bytes
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.job import Job, Request
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Sampling
from zero2all.infer.tools import TOOLS, Tool, read_answer, run_call
from zero2all.tokenizer.chat import Message
from zero2all.tokenizer.template import ChatTemplate

CACHE_SHARE = 0.3
"""Of the free memory of a GPU, at most: the rest is for the passes of training."""
MOST_AT_ONCE = 256
"""Answers that are drawn at once, on a GPU."""


@dataclass
class Answer:
    """An answer to a prompt, turn after turn."""

    prompt: int
    """Number of the prompt in its split."""
    ids: list[int]
    """The prompt and all that follows."""
    logps: list[float | None]
    """Of each id after the prompt; None: nobody drew it."""
    texts: list[str] = field(default_factory=list)
    """What was written in each turn."""
    calls: int = 0
    refused: int = 0
    """Calls that were not understood."""
    ended: bool = False
    """It ended by itself, and was not cut."""
    text: str = ""
    """What the last turn says, without thought and calls."""

    @property
    def drawn(self) -> int:
        """How many of its tokens the model wrote."""
        return sum(logp is not None for logp in self.logps)


class Sampler:
    """Draws answers from one model, whose weights may change between calls."""

    def __init__(self, loaded: LoadedModel, template: ChatTemplate, config: GrpoConfig, max_len: int) -> None:
        """`max_len`: tokens of a prompt with its answer."""
        self.config, self.template, self.tokenizer = config, template, loaded.tokenizer
        self.model = loaded.model
        self.tools = tools_of(config)
        vocabulary = Vocabulary(loaded.tokenizer, loaded.model.config.vocab_ids)
        vocabulary.never = vocabulary.never[:0]  # the trainer divides by all ids, too
        self.engine = Engine(
            loaded, EngineSettings(cache_bytes=_cache_bytes(loaded, max_len), max_len=max_len), vocabulary
        )

    def draw(
        self, prompts: Mapping[int, Sequence[int]], answers: int, key: str, likeliest: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> list[Answer]:  # fmt: skip
        """Answers to each of the prompts (number -> ids). `likeliest`: the token of highest probability each time.
        `alive` is called again and again."""
        self.engine.refresh()
        found: list[Answer] = []
        running: dict[Job, tuple[Answer, int]] = {}

        def ask(answer: Answer, seed: int) -> None:
            room = min(self.config.max_new_tokens - len(answer.logps), self.engine.max_len - len(answer.ids))
            sampling = Sampling(temperature=0.0 if likeliest else 1.0, seed=seed + len(answer.texts))
            ends = frozenset(self.template.end_ids)
            running[self.engine.submit(Request(answer.ids, room, sampling, alternatives=0, end_ids=ends))] = (
                answer,
                seed,
            )

        for number, ids in prompts.items():
            for copy in range(answers):
                found.append(Answer(number, list(ids), []))
                ask(found[-1], _seed(key, number, copy))
        while running:
            alive()
            for job in self.engine.step():
                if job.finish is not None and job in running:
                    answer, seed = running.pop(job)
                    if self._goes_on(answer, job):
                        ask(answer, seed)
        return found

    def _goes_on(self, answer: Answer, job: Job) -> bool:
        """Take up what a turn wrote; whether functions were called, have answered, and there is room to go on."""
        answer.ids += job.new_ids
        answer.logps += [choice.logprob for choice in job.choices]
        answer.ended = job.ending is not None
        if job.ending is not None:
            answer.ids.append(job.ending.id)
            answer.logps.append(job.ending.logprob)
        whole = self.tokenizer.decode(job.new_ids)
        written = read_answer(whole, with_calls=bool(self.tools))
        answer.texts.append(whole)
        answer.text = written.text.strip()
        answer.calls += len(written.calls)
        answer.refused += written.refused
        is_last = len(answer.texts) >= self.config.max_turns
        if not written.calls or is_last or job.ending is None or job.ending.id not in self.template.end_ids:
            return False
        results = [Message("tool", run_call(call, self.tools)) for call in written.calls]
        after = self.template.encode_after(results)[1:]  # the end of the answer was drawn
        room = min(self.config.max_new_tokens - len(answer.logps), self.engine.max_len - len(answer.ids))
        if len(after) >= room:
            answer.ended = False
            return False
        answer.ids += after
        answer.logps += [None] * len(after)
        return True


def tools_of(config: GrpoConfig) -> dict[str, Tool]:
    """The functions that answers may call, by name."""
    unknown = [name for name in config.tools if name not in TOOLS]
    if unknown:
        raise UsageError(f"finetune.grpo.tools: there is no {unknown[0]!r}. Expected: {', '.join(TOOLS)}.")
    return {name: TOOLS[name] for name in config.tools}


def _cache_bytes(loaded: LoadedModel, max_len: int) -> int | None:
    if loaded.device.type != "cuda":
        return None
    one = block_bytes(loaded.model.config, loaded.model.embedding.weight.dtype)
    of_text = (max_len // BLOCK + 2) * one
    return max(2 * of_text, min(int(torch.cuda.mem_get_info(loaded.device)[0] * CACHE_SHARE), MOST_AT_ONCE * of_text))


def _seed(key: str, prompt: int, copy: int) -> int:
    digest = hashlib.blake2b(f"{key}/{prompt}/{copy}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def answer_values(answer: Answer) -> list[Any]:
    """As JSON, for the other processes."""
    return [answer.prompt, answer.ids, answer.logps, answer.calls, answer.refused, answer.ended]


def answer_from(values: Sequence[Any]) -> Answer:
    """The answer of another process; its texts stay there."""
    prompt, ids, logps, calls, refused, ended = values
    return Answer(prompt, ids, logps, [], calls, refused, ended)
