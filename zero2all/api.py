"""The Python API: what `import zero2all` offers beside the command line.

    zero2all.train_run("quickstart", work="my-model", train={"name": "first", "steps": 200})
    model = zero2all.load("first", work="my-model")
    print(model.generate("The capital of France is", max_new_tokens=8))
    print(zero2all.metrics("first", work="my-model")["loss"])

Each function does what the verb of its name does. Errors that a person can mend are `common.errors.UserError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from zero2all.common.errors import UsageError
from zero2all.common.workspace import open_workspace
from zero2all.config import load_with_rules
from zero2all.evals.perplexity import Windows
from zero2all.finetune.objectives import objective_of
from zero2all.infer import CHAT_NEW_TOKENS, CHAT_TEMPERATURE, WeightKind
from zero2all.infer.boundary import opening_id
from zero2all.infer.conversation import Conversation
from zero2all.infer.engine import Engine, EngineSettings
from zero2all.infer.load import LoadedModel, load_model
from zero2all.infer.sampling import Sampling
from zero2all.infer.text import TextRequest, complete, stream
from zero2all.parallel.launch import local_processes
from zero2all.tokenizer.chat import Message
from zero2all.tokenizer.load import load_tokenizer
from zero2all.tokenizer.text import well_formed
from zero2all.track.reader import read_run
from zero2all.train.run import train
from zero2all.train.saved_config import load_run_config
from zero2all.train.trainer import TrainSummary

Stops = Sequence[str]


class Draw(TypedDict, total=False):
    """How the next token is chosen: the fields of `infer.sampling.Sampling`, with its defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True)
class Score:
    """What a model says of a text."""

    ids: list[int]
    """The tokens of the text."""
    logprobs: list[float]
    """Of each token, given those before it: natural logarithms."""
    bytes: int
    """Of the text in UTF-8."""

    @property
    def loss(self) -> float:
        """-sum(logprobs) / tokens."""
        return -math.fsum(self.logprobs) / len(self.logprobs)

    @property
    def bits_per_byte(self) -> float:
        """-sum(logprobs) / ln 2 / bytes: comparable over tokenizers."""
        return -math.fsum(self.logprobs) / math.log(2) / self.bytes


def load(
    source: str | Path, work: str | Path | None = None, *,
    step: int | None = None, device: str | None = None, dtype: str | None = None,
    weights: WeightKind = "plain",
) -> Model:  # fmt: skip
    """The model of a run (the path of its folder, or its name in the workspace `work`) or of a Hugging Face folder.
    `step` None takes the newest checkpoint, `device` None a GPU where there is one, `dtype` None bfloat16 there and
    float32 on a CPU; `weights` "int8" and "int4" keep the matrices in 8 or 4 bits."""
    workspace = None if work is None else open_workspace(Path(work))
    return Model(load_model(str(source), workspace, step, device, dtype), weights)


class Model:
    """A model in memory, with an engine of its own. For one thread; `z2a serve` is for many."""

    def __init__(self, loaded: LoadedModel, weights: WeightKind = "plain") -> None:
        self.loaded = loaded
        """Its name, step, config, tokenizer and the torch module."""
        self._engine = Engine(loaded, EngineSettings(weights=weights, owns_model=True))

    def __repr__(self) -> str:
        return f"<Model {self.loaded.name}: step {self.loaded.step:,}, {self.loaded.parameters:,} parameters>"

    @overload
    def generate(self, prompt: str, max_new_tokens: int = ..., stop: Stops = ..., **draw: Unpack[Draw]) -> str: ...
    @overload
    def generate(
        self, prompt: list[str], max_new_tokens: int = ..., stop: Stops = ..., **draw: Unpack[Draw]
    ) -> list[str]: ...
    def generate(
        self, prompt: str | list[str], max_new_tokens: int = 100, stop: Stops = (), **draw: Unpack[Draw]
    ) -> Any:
        """The text that follows `prompt`, without it; of several prompts, run as one batch, a list. Temperature 0, the
        default, takes the likeliest tokens; else each prompt draws with a seed of its own: `seed`, `seed` + 1, …"""
        if isinstance(prompt, str):
            return "".join(self.stream(prompt, max_new_tokens, stop, **draw))
        sampling = Sampling(**draw)
        requests = [
            TextRequest(well_formed(text), max_new_tokens, replace(sampling, seed=seed), tuple(stop))
            for seed, text in enumerate(prompt, sampling.seed)
        ]
        found = {number: text for number, text, _ in complete(self._engine, requests)}
        return [found[number] for number in range(len(requests))]

    def stream(self, prompt: str, max_new_tokens: int = 100, stop: Stops = (), **draw: Unpack[Draw]) -> Iterator[str]:
        """The same text as it is written, in whole characters. Closing the iterator ends it."""
        request = TextRequest(well_formed(prompt), max_new_tokens, Sampling(**draw), tuple(stop))
        yield from (piece.text for piece in stream(self._engine, request) if piece.text)

    def chat(
        self, messages: str | Sequence[Mapping[str, str]], max_new_tokens: int = CHAT_NEW_TOKENS,
        stop: Stops = (), frame: str = "auto", **draw: Unpack[Draw],
    ) -> str:  # fmt: skip
        """The answer to a question, or to messages such as {"role": "user", "content": "…"}. The layout is that of
        `z2a chat` (`frame`: auto, template, frame or plain), and so is the temperature: 0.7 unless given. The oldest
        turns are left out where the model has no room for them; its thoughts are not returned."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise UsageError(f'A message is {message}; expected {{"role": "user", "content": "…"}} with texts.')
        turns = [Message(message["role"], well_formed(message["content"])) for message in messages]
        system = turns.pop(0).text if turns and turns[0].role == "system" else ""
        conversation = Conversation(self.loaded, self._engine.max_len, frame, system, turns)
        prompt = conversation.fitted(max_new_tokens).prompt
        draw.setdefault("temperature", CHAT_TEMPERATURE)
        request = TextRequest(
            prompt.prompt, max_new_tokens, Sampling(**draw), (*prompt.stop, *stop), prompt.heal, None, prompt.end_ids
        )
        text = prompt.read("".join(piece.text for piece in stream(self._engine, request))).text
        return text if prompt.how == "plain" else text.strip()

    @overload
    def score(self, text: str, whole: bool = ..., stride: int = ...) -> Score: ...
    @overload
    def score(self, text: list[str], whole: bool = ..., stride: int = ...) -> list[Score]: ...
    def score(self, text: str | list[str], whole: bool = False, stride: int = 0) -> Score | list[Score]:
        """How likely a text is, as the beginning of a document; `whole`: as all of it, so that its end counts too, as
        in `z2a eval`. A longer text than the model's window is cut into windows, `stride` tokens apart; 0: they do not
        overlap."""
        if isinstance(text, str):
            return self.score([text], whole, stride)[0]
        if not all(text):
            raise UsageError("A text to score is empty. Leave it out: it has no bytes.")
        tokenizer, windows = self.loaded.tokenizer, Windows(self.loaded.window, stride)
        texts = [well_formed(each) for each in text]
        closing = [tokenizer.end_id] if whole else []
        documents = [[opening_id(tokenizer), *ids, *closing] for ids in tokenizer.encode_batch(texts)]
        found = [Score(ids[1:], [], len(each.encode())) for ids, each in zip(documents, texts, strict=True)]
        cuts = [(number, *cut) for number, ids in enumerate(documents) for cut in windows.cut(len(ids))]
        rows = [documents[number][first:end] for number, first, _, end in cuts]
        scores = self._engine.score(rows, [start - first for _, first, start, _ in cuts])
        for (number, *_), part in zip(cuts, scores, strict=True):
            found[number].logprobs.extend(part.logprobs)
        return found


def train_run(
    config: str | Path, work: str | Path, *, fresh: bool = False, accept_changes: bool = False, **fields: Any
) -> TrainSummary:
    """Train on the packed data of the workspace `work`, in this process, or continue the run. `config` is a preset, a
    YAML file or a run's folder; `fields` replace what it says, section by section:
    `train={"name": "first", "steps": 200}, optim={"lr_max": 3e-4}`. A program that torchrun has started in several
    processes calls this in each. `fresh` deletes an earlier run of this name; `accept_changes` continues one whose
    settings have changed."""
    sections = {name: values if isinstance(values, Mapping) else {"": values} for name, values in fields.items()}
    flat = {
        f"{name}.{leaf}".rstrip("."): value for name, section in sections.items() for leaf, value in section.items()
    }
    overrides = [f"--{name}={json.dumps(value, default=str)}" for name, value in flat.items()]
    run_config, filled = load_with_rules(config, overrides)
    workspace = open_workspace(Path(work))
    run = workspace.run(run_config.train.name)
    if filled and not fresh and any(run.glob("checkpoints/step-*")):  # a run that goes on keeps the values of its rules
        run_config, _ = load_with_rules(config, overrides, saved=load_run_config(run))
    if (processes := local_processes(run_config.parallel)) > 1:
        raise UsageError(
            f"This run takes {processes} processes, and zero2all.train_run trains in the one that calls it. Give "
            f'parallel={{"processes": 1}}, start the program with torchrun, or use `z2a train`.'
        )
    return train(
        run_config, workspace, fresh, accept_changes,
        make_decode=lambda: lambda ids: load_tokenizer(workspace.tokenizer).decode(ids, skip_control=False),
        make_objective=objective_of,
    )  # fmt: skip


def metrics(run: str | Path, work: str | Path | None = None) -> Any:
    """All metrics of a run (the path of its folder, or its name in the workspace `work`): `step`, `tokens` and `time`
    (seconds since 1970), and a column for each metric, NaN at steps without it. A DataFrame where pandas is installed,
    else a dict of numpy arrays with the same names; a running run can be read, too."""
    folder = Path(run) if work is None else open_workspace(Path(work)).existing_run(str(run))
    series = read_run(folder).series
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(each.step for each in series.values())]))
    columns = {"step": steps, "tokens": np.zeros(len(steps), np.int64), "time": np.zeros(len(steps))}
    for name, points in series.items():
        rows = np.searchsorted(steps, points.step)
        columns["tokens"][rows], columns["time"][rows] = points.tokens, points.time
        columns[name] = np.full(len(steps), np.nan)
        columns[name][rows] = points.value
    with suppress(ImportError):
        import pandas

        return pandas.DataFrame(columns)
    return columns
