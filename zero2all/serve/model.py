"""The model that is served, from loading to the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from zero2all.common.errors import UserError
from zero2all.infer import CHAT_NEW_TOKENS, CHAT_TEMPERATURE
from zero2all.infer.chat import chat_prompt, choose
from zero2all.infer.engine import EngineSettings
from zero2all.infer.load import LoadedModel
from zero2all.infer.sampling import Sampling
from zero2all.infer.service import Service
from zero2all.infer.tools import TOOLS
from zero2all.serve.wire import RefusedError
from zero2all.tokenizer.chat import Message

LOADING, READY, DRAINING = "loading", "ready", "draining"


class ServedModel:
    """One model behind an engine: what it is called, what state it is in, how many may wait."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        settings: EngineSettings | None = None,
        name: str | None = None,
        max_waiting: int = 256,
    ) -> None:
        self._load, self._settings = load, settings or EngineSettings()
        self._name, self.max_waiting = name, max_waiting
        self._loaded: LoadedModel | None = None
        self._service: Service | None = None
        self._facts: dict[str, Any] = {}
        self.state = LOADING
        self.created = int(time.time())

    def open(self) -> None:
        """Load it and start the engine; takes its time."""
        loaded = self._load()
        self._facts = _facts(loaded)  # now: the engine may take weights over, and the folder may be gone later
        self._service = Service(loaded, self._settings)
        self._facts["max_len"] = self._service.engine.max_len
        if self._settings.weights != "plain":
            self._facts["dtype"] = self._settings.weights
        self._loaded = loaded
        if self.state == LOADING:
            self.state = READY

    def drain(self) -> None:
        """Take no more requests."""
        self.state = DRAINING

    def close(self, wait_seconds: float) -> None:
        """Let what runs finish for so long, cancel the rest, end the engine."""
        self.drain()
        if self._service is not None:
            self._service.close(wait_seconds)

    @property
    def name(self) -> str:
        """The id that clients name it by."""
        return self._name or self.loaded.name

    @property
    def loaded(self) -> LoadedModel:
        """The model; refused while it is not loaded."""
        self._require_loaded()
        assert self._loaded is not None
        return self._loaded

    @property
    def service(self) -> Service:
        """The engine; refused while it is not loaded."""
        self._require_loaded()
        assert self._service is not None
        return self._service

    def _require_loaded(self) -> None:
        if self._loaded is None:
            raise RefusedError(503, "The model is being loaded. Try again in a few seconds.", code="loading")

    def require_free(self) -> Service:
        """The engine, where one more request may be handed in now."""
        if self.state == DRAINING:
            raise ending()
        service = self.service
        if service.stats.waiting >= self.max_waiting:
            raise RefusedError(
                429,
                f"{self.max_waiting} requests are waiting already (--max-waiting). Try again in a moment.",
                code="too_many_waiting",
            )
        return service

    def require_name(self, asked: str | None) -> None:
        """Refuse a request that means another model."""
        if asked not in (None, self.name):
            raise RefusedError(
                404,
                f"The model `{asked[:200]}` is not served here; this server has `{self.name}`.",
                "model",
                "model_not_found",
            )

    def facts(self) -> dict[str, Any]:
        """The model as /v1/models describes it; `z2a` holds what OpenAI has no field for."""
        self._require_loaded()
        facts = {"id": self.name, "object": "model", "created": self.created, "owned_by": "zero2all"}
        return {**facts, "z2a": self._facts}

    def stats(self) -> dict[str, Any]:
        """What happens now."""
        found: dict[str, Any] = {"status": self.state, "running": 0, "waiting": 0}
        if self._service is not None:
            stats = self._service.stats
            found |= {"running": stats.running, "waiting": stats.waiting, "generated_tokens": stats.generated_tokens}
            found["tokens_per_second"] = stats.tokens_per_second
            found["cache"] = {"blocks": stats.cache_blocks, "free": stats.cache_blocks_free}
        return found


def _facts(loaded: LoadedModel) -> dict[str, Any]:
    weight = next(loaded.model.parameters())
    sampling = dataclasses.asdict(Sampling(CHAT_TEMPERATURE)) | {"max_tokens": CHAT_NEW_TOKENS}
    for name in ("seed", "frequency_penalty", "presence_penalty", "logit_bias"):
        del sampling[name]  # the page takes another seed for each answer, and offers no such penalties
    tools = [tool.spec for tool in TOOLS.values()]
    try:
        chat_prompt(loaded, [Message("user", "?")], tools=tools)
    except UserError:  # it has not learned to call functions
        tools = []
    return {
        "parameters": loaded.parameters,
        "step": loaded.step,
        "tokens": loaded.tokens,
        "chat": choose(loaded).how,
        "tools": tools,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "sampling": sampling,
    }


def ending() -> RefusedError:
    """The refusal of a server that is about to end."""
    return RefusedError(503, "This server is ending and takes no more requests.", code="draining")
