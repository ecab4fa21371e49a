"""Refusals: an HTTP status and OpenAI's error body, with a message that says what to do."""

from __future__ import annotations

from typing import Any

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
RETRY_SECONDS = {429: 1, 503: 2}


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def headers(self) -> dict[str, str]:
        """When to try again, where that helps; after a body that did not come, the connection is of no use."""
        if self.status == 408:
            return {"Connection": "close"}
        return {"Retry-After": str(RETRY_SECONDS[self.status])} if self.status in RETRY_SECONDS else {}

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}
