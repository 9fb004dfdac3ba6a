"""The error of a request in the form that OpenAI's clients read: {"error": {message, type, param, code}}."""

from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
    504: "timeout",
}


class Problem(Exception):
    """An error response; its message ends with the next step."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Retry-After, where the time is known."""
        seconds = self.retry_after_s
        return [] if seconds is None else [(b"retry-after", str(max(1, round(seconds))).encode())]


def bad_request(message: str, param: str | None = None, code: str | None = None) -> Problem:
    """A 400: the request cannot be served as it is."""
    return Problem(400, message, param=param, code=code)
