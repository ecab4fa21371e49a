"""`z2a chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from zero2all.cli.model import add_model, add_sampling, load, sampling_of
from zero2all.cli.verb import Subparsers, add_verb


def register(verbs: Subparsers) -> None:
    """Add the verb."""
    from zero2all.infer import CHAT_NEW_TOKENS, CHAT_TEMPERATURE

    parser = add_verb(
        verbs,
        "chat",
        "talk to a model in the terminal",
        "z2a chat my-run --work my-workspace\n  z2a chat path/to/huggingface/folder --system 'Answer briefly.'",
        _chat,
    )
    add_model(parser)
    parser.add_argument(
        "--frame",
        choices=("auto", "template", "frame", "plain"),
        default="auto",
        help="layout of the conversation: template, as the model was trained; frame, questions and answers as its "
        "text writes them, or else in a common form; plain, your text continued as it is (default auto: template if "
        "the model was trained with it, frame if the form of its text is known, else plain)",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    parser.add_argument("--load", type=Path, metavar="FILE", help="continue a conversation that was saved with /save")
    add_sampling(parser, CHAT_TEMPERATURE, CHAT_NEW_TOKENS)


def _chat(arguments: argparse.Namespace) -> int:
    sampling = sampling_of(arguments)
    loaded = load(arguments)

    from zero2all.infer.conversation import Conversation
    from zero2all.infer.engine import EngineSettings
    from zero2all.infer.service import Service
    from zero2all.infer.talk import Talk
    from zero2all.tokenizer.text import well_formed

    service = Service(loaded, EngineSettings(max_batch=1, int8=arguments.int8, owns_model=True))
    try:
        conversation = Conversation(loaded, service.engine.max_len, arguments.frame, well_formed(arguments.system))
        if arguments.load is not None:
            conversation.load(arguments.load)
        stops = tuple(map(well_formed, arguments.stop))
        return Talk(service, conversation, sampling, arguments.max_new_tokens, stops).run()
    finally:
        service.close()
