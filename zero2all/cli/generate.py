"""`z2a generate`, `chat` and `serve`: what a model writes, in the terminal, into a file, or for others to ask."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero2all.cli.verb import verb, workspace_of, workspaces_below
from zero2all.common.errors import BadInputError, UsageError
from zero2all.common.language import translate as t
from zero2all.common.progress import TEXT_MARKS, counted, progress, say, tell, terminal_safe

if TYPE_CHECKING:
    from zero2all.infer.batch import BatchPrompt
    from zero2all.infer.load import LoadedModel
    from zero2all.infer.prompts import Prompt
    from zero2all.infer.sampling import Sampling
    from zero2all.infer.service import Service
    from zero2all.serve.server import ModelServer

SHORTEST_TOKEN = 16


@verb("""
    generate: continue texts with a model

    model? --work --step --device --dtype --weights --parallel.tensor/tensor --parallel.pipeline/pipeline
    |! --prompt* TEXT =None        the beginning of a text; may be repeated
    |! --prompts FILE              file with many prompts: one per line as text, or JSON lines {"prompt": "…"} with
        settings such as "temperature", "stop" and "id" (if the first line is JSON, or the name ends with .jsonl); -
        reads standard input
    --out FILE:out                 write the texts to this file as JSON lines; an interrupted command continues it
    --n N:int>=1..10000 =1         texts for each prompt (default 1, at most 10,000); needs a temperature
    --max-new-tokens N:count =100  most tokens to generate (default 100)
    --temperature X:float>=0 =0    0 always takes the most likely token, 1 samples from the model's distribution
        (default 0)
    --top-k --top-p --min-p --repetition-penalty --stop* --seed
    --logprobs N:int>=0..20        print JSON with the log probability of each token and of the N most likely ones at
        its place (at most 20)
    --no-heal                      use the tokens of the prompt as they are, even if it ends inside a token

    z2a generate my-run --work my-workspace --prompt "中国的首都是"
    z2a generate my-run --work my-workspace --prompts questions.jsonl --out answers.jsonl
    """)
def _generate(arguments: argparse.Namespace) -> int | None:
    return over_ranks(arguments, partial(_load, arguments), partial(_write, arguments))


def _write(arguments: argparse.Namespace, world: Any) -> int | None:
    from zero2all.infer.engine import EngineSettings
    from zero2all.infer.service import Service

    if arguments.out is not None and str(arguments.out) == "-":
        raise UsageError("--out needs the name of a file. Without --out the results go to standard output.")
    prompts = _prompts(arguments)  # before the model is loaded: every bad line is named at once
    _note_useless_draws(prompts)
    loaded = _load(arguments, world)
    at_once = 1 if sum(prompt.n for prompt in prompts) == 1 else None
    service = Service(loaded, EngineSettings(at_once, weights=arguments.weights, owns_model=True))
    try:
        if arguments.out is not None:
            return _to_file(arguments, service, prompts)
        if arguments.prompts is not None or arguments.logprobs is not None:
            return _as_json(service, prompts)
        _as_text(service, prompts)
        return None
    finally:
        service.close()


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    from zero2all.infer.prompts import Prompt, prompts_file, read_prompts
    from zero2all.infer.text import TextRequest
    from zero2all.tokenizer.text import well_formed

    usual = TextRequest(
        "",
        arguments.max_new_tokens,
        _sampling(arguments),
        tuple(map(well_formed, arguments.stop)),
        heal=not arguments.no_heal,
        logprobs=arguments.logprobs,
    )
    if arguments.prompt is not None:
        import dataclasses

        texts = map(well_formed, arguments.prompt)  # bytes that are no UTF-8 come as surrogates
        return [Prompt(dataclasses.replace(usual, prompt=text), arguments.n) for text in texts]
    if arguments.prompts == "-":
        return read_prompts(sys.stdin.buffer.read(), "standard input", Prompt(usual, arguments.n))
    path = Path(arguments.prompts)
    if arguments.out is not None and arguments.out.resolve() == path.resolve():
        raise UsageError(f"--out {path} is the file with the prompts and would be overwritten. Choose another file.")
    return read_prompts(prompts_file(path), path.name, Prompt(usual, arguments.n))


def _note_useless_draws(prompts: list[Prompt]) -> None:
    """Say so where several texts, or a seed, are asked for and nothing is drawn."""
    greedy = [prompt for prompt in prompts if prompt.request.sampling.is_greedy]
    if any(prompt.n > 1 for prompt in greedy):
        say(
            "z2a: the temperature is 0, so all texts of a prompt are the same. Use --temperature 0.8 "
            "for different ones."
        )
    elif any(prompt.request.sampling.seed for prompt in greedy):
        say("z2a: the temperature is 0, so the seed has no effect. Use --temperature 0.8 to sample.")


def _as_text(service: Service, prompts: list[Prompt]) -> None:
    """Each prompt with its continuation, as it is written."""
    from zero2all.infer.batch import tasks_of

    on_terminal = sys.stdout.isatty()

    def show(text: str) -> None:
        print(terminal_safe(text, keep=TEXT_MARKS) if on_terminal else text, end="", flush=True)

    for number, task in enumerate(tasks_of(prompts)):
        show(f"{chr(10) * 2 if number else ''}{task.request.prompt}")
        for piece in service.stream(task.request):
            show(piece.text)
            if piece.finish == "error":
                raise BadInputError(piece.error)
    print()


def _as_json(service: Service, prompts: list[Prompt]) -> int:
    """All results on standard output, in the order of the prompts."""
    from zero2all.common.jsonio import dumps_line
    from zero2all.infer.batch import tasks_of

    tasks, out = tasks_of(prompts), sys.stdout  # as long as there is a bar, rich takes the place of sys.stdout
    ready: dict[tuple[int, int], dict[str, Any]] = {}
    order = iter(task.key for task in tasks)
    key = next(order)
    refused = 0
    for result in _with_bar(service, tasks, len(tasks), quiet=out.isatty()):
        refused += "error" in result
        ready[result["index"], result.get("sample", 0)] = result
        while key in ready:
            print(dumps_line(ready.pop(key)).decode(), end="", flush=True, file=out)
            key = next(order, (-1, 0))
    return _exit_code(refused, len(tasks))


def _to_file(arguments: argparse.Namespace, service: Service, prompts: list[Prompt]) -> int:
    """The results in a file; what was finished before is not done again."""
    from zero2all.infer.batch import BatchResults, finished, tasks_of

    tasks, job = tasks_of(prompts), _job(service.loaded, prompts, arguments)
    if (refused_before := finished(arguments.out, job)) is not None:
        say(f"{arguments.out} is already finished, so nothing was done. Delete it to generate it again.")
        return _exit_code(refused_before, len(tasks))
    with BatchResults(arguments.out, job) as results:
        left = [task for task in tasks if task.key not in results.done]
        if len(left) < len(tasks):
            say(f"{counted(len(tasks) - len(left), 'text')} of {len(tasks):,} are already finished")
        for result in _with_bar(service, left, len(tasks)):
            results.add(result)
        refused = results.join([task.key for task in tasks])
    say(f"{counted(len(tasks), 'text')} in {arguments.out}")
    return _exit_code(refused, len(tasks))


def _job(loaded: LoadedModel, prompts: list[Prompt], arguments: argparse.Namespace) -> str:
    """A name for exactly these texts: model, prompts and settings."""
    from dataclasses import asdict

    from zero2all.common.manifest import fingerprint

    folder = str(loaded.folder and loaded.folder.resolve())
    model = [folder, loaded.step, loaded.tokenizer.fingerprint, arguments.dtype, arguments.weights]
    return fingerprint([model, [[asdict(prompt.request), prompt.n, prompt.id] for prompt in prompts]])


def _with_bar(service: Service, tasks: list[BatchPrompt], total: int, quiet: bool = False) -> Iterator[dict[str, Any]]:
    """The results of `tasks`, with a bar; texts that cannot be written are named."""
    from zero2all.infer.batch import results_of

    places = {task.key: task.prompt.place for task in tasks}
    with progress("generate", total, "texts", done=total - len(tasks), quiet=quiet) as bar:
        for result in results_of(service, tasks):
            bar.advance(1, f"{service.stats.tokens_per_second:,.0f} tokens/s")
            if "error" in result:
                place = places[result["index"], result.get("sample", 0)]
                say(f"z2a: {place or t('prompt') + ' ' + str(result['index'] + 1)}: {terminal_safe(result['error'])}")
            yield result


def _exit_code(refused: int, total: int) -> int:
    if refused:
        say(f"z2a: {counted(refused, 'text')} of {total:,} could not be generated; their results contain the reason")
    return BadInputError.exit_code if refused else 0


@verb("""
    chat: talk to a model in the terminal

    model? --work --step --device --dtype --weights
    --frame auto|template|frame|plain =auto  layout of the conversation: template, as the model was trained; frame,
        questions and answers as its text writes them, or else in a common form; plain, your text continued as it is
        (default auto: template if the model was trained with it, frame if the form of its text is known, else plain)
    --system TEXT =                instructions for the model
    --tool none|calculator =none   a function that the model may call
    --thinking auto|on|off =auto   whether the model thinks before it answers, where its template has a switch
    --max-new-tokens N:count =512  most tokens to generate (default 512)
    --temperature X:float>=0 =0.7  0 always takes the most likely token, 1 samples from the model's distribution
        (default 0.7)
    --top-k --top-p --min-p --repetition-penalty --stop* --seed

    z2a chat my-run --work my-workspace
    z2a chat path/to/huggingface/folder --system 'Answer briefly.'
    """)
def _chat(arguments: argparse.Namespace) -> int:
    sampling = _sampling(arguments)
    loaded = _load(arguments)

    from zero2all.infer.conversation import Conversation
    from zero2all.infer.engine import EngineSettings
    from zero2all.infer.service import Service
    from zero2all.infer.talk import Talk
    from zero2all.infer.tools import TOOLS
    from zero2all.tokenizer.text import well_formed

    service = Service(loaded, EngineSettings(max_batch=1, weights=arguments.weights, owns_model=True))
    try:
        conversation = Conversation(loaded, service.engine.max_len, arguments.frame, well_formed(arguments.system))
        conversation.tools = [TOOLS[arguments.tool].spec] if arguments.tool in TOOLS else []
        conversation.thinking = {"on": True, "off": False}.get(arguments.thinking)
        stops = tuple(map(well_formed, arguments.stop))
        return Talk(service, conversation, sampling, arguments.max_new_tokens, stops).run()
    finally:
        service.close()


@verb("""
    serve: serve a model: an OpenAI-compatible API, and a page to talk to it

    model? --work --step --device --dtype --weights --parallel.tensor/tensor --parallel.pipeline/pipeline
    --name NAME                   name of the model for clients (default: the name of the run)
    --max-len N:int>=2            tokens of prompt and answer together (default: the model's)
    --max-batch N:int>=1          answers generated at once (default: 32 on a CPU, 256 on a GPU)
    --max-waiting N:int>=1 =256   requests that may wait; further ones are refused with 429 (default 256)
    --cache-gb X:float>=0         memory for keys and values in GB (default: depends on the free memory)
    --port N:int>=0..65535        port (default: the first free one from 6107)
    --host --token
    --token-file FILE:path        read the token from this file, so that it stays the same
    --allow-host*
    --cors* ORIGIN                another site whose pages may use the API, such as https://example.org; can be repeated
    --grace SECONDS:float>=0 =30  how long running requests may continue after Ctrl-C or SIGTERM (default 30)
    --open                        open the page in the browser

    z2a serve my-run --work my-workspace --open
    z2a serve path/to/huggingface-folder --port 8000
    """)
def _serve(arguments: argparse.Namespace) -> int | None:
    return over_ranks(arguments, partial(_load, arguments), partial(_serve_here, arguments))


def _serve_here(arguments: argparse.Namespace, world: Any) -> None:
    token = _token_in(arguments.token_file) if arguments.token_file else None
    for each in arguments.cors:
        if not re.fullmatch(r"https?://[^/\s*]+", each):
            raise UsageError(
                f"--cors {each}: give one site, such as https://example.org, without a path and without *."
            )

    from zero2all.infer.engine import EngineSettings
    from zero2all.serve.model import ServedModel
    from zero2all.serve.server import ModelServer, ServeOptions

    cache_bytes = None if arguments.cache_gb is None else int(arguments.cache_gb * 1e9)
    settings = EngineSettings(
        arguments.max_batch, cache_bytes, arguments.max_len, weights=arguments.weights, owns_model=True
    )
    model = ServedModel(lambda: _load(arguments, world), settings, arguments.name, arguments.max_waiting)
    options = ServeOptions(
        arguments.host, arguments.port, arguments.token, token, arguments.allow_host, arguments.grace,
        origins=arguments.cors,
    )  # fmt: skip
    server = ModelServer(model, options, lambda: _say_ready(server, arguments))
    tell(f"Loading {arguments.model} …", flush=True)
    server.serve()


def _say_ready(server: ModelServer, arguments: argparse.Namespace) -> None:
    facts = server.model.facts()
    z2a = facts["z2a"]
    tell(f"{facts['id']}: {z2a['parameters'] / 1e6:,.1f} M parameters, {z2a['dtype']}, {z2a['device']}")
    if (arguments.max_len or 0) > z2a["max_len"]:
        tell(f"--max-len {arguments.max_len} is reduced to {z2a['max_len']}, the model's maximum (model.max_seq_len)")
    key = f", api_key={server.token}" if server.token else t(", any api_key")
    tell(f"The page is at {server.page}   (Ctrl-C ends it)")
    tell(f"OpenAI clients: base_url={server.url}v1{key}, model={facts['id']}", flush=True)
    if arguments.open:
        import webbrowser

        webbrowser.open(server.page)


def _token_in(path: Path) -> str:
    try:
        token, mode = path.read_text(encoding="utf-8").strip(), path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(
            f"The token in {path} cannot be read ({error}). Give a file with one line of text."
        ) from None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInputError(
            f"The token in {path} must have at least {SHORTEST_TOKEN} printable ASCII characters "
            f"without spaces, on one line. `openssl rand -hex 24 > {path}` makes a good one."
        )
    if mode & 0o077:
        raise BadInputError(f"Others on this machine may read or change {path}, which holds a token: chmod 600 {path}")
    return token


def _sampling(arguments: argparse.Namespace) -> Sampling:
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


def over_ranks(
    arguments: argparse.Namespace, load: Callable[[Any], LoadedModel], command: Callable[[Any], int | None]
) -> int | None:
    """A command in this process; or, where the model is spread, in rank 0 of several, which the others follow. `load`
    and `command` get the ranks, or None."""
    count = arguments.tensor * arguments.pipeline
    if count == 1:
        return command(None)
    named = getattr(arguments, "device", None) or "auto"
    device: Any = named if named in ("auto", "cpu") else "cuda"
    if "LOCAL_RANK" not in os.environ:
        from zero2all.parallel.launch import start_ranks

        return start_ranks(count, device, arguments.command_line)

    from zero2all.infer.spread import lead_or_follow

    return lead_or_follow(arguments.tensor, arguments.pipeline, device, load, command)


def _load(arguments: argparse.Namespace, world: Any = None) -> LoadedModel:
    """The model that the arguments name, or what this rank has of it."""
    from zero2all.common.workspace import Workspace, is_folder_name
    from zero2all.infer.load import load_model

    is_name = is_folder_name(arguments.model) and not Path(arguments.model).exists()
    if is_name and (arguments.work != Path() or workspaces_below()):
        workspace_of(arguments)  # says which workspaces there are
    device = world.device if world else arguments.device
    return load_model(arguments.model, Workspace(arguments.work), arguments.step, device, arguments.dtype, world)
