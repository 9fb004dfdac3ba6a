"""Routes of KServe's open inference protocol, version 2: /v2/health, /v2/models/NAME and its /infer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from armillary import __version__
from armillary.serving.http.api_keys import REFUSAL
from armillary.serving.predict.json_workers import KSERVE
from armillary.serving.predict.kserve import BINARY, metadata

if TYPE_CHECKING:
    from armillary.serving.predict.app import PredictServer


class KserveApi:
    """The protocol in front of a predict server; health needs no key."""

    def __init__(self, state: PredictServer) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        of_model = (("", self.describe, "GET"), ("/ready", self.model_ready, "GET"), ("/infer", self.infer, "POST"))
        return [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            *(
                Route(f"/v2/models/{{name}}{version}{end}", handler, methods=[method])
                for version in ("", "/versions/{version}")
                for end, handler, method in of_model
            ),
        ]

    async def server(self, request: Request) -> Response:
        return JSONResponse({"name": "armillary", "version": __version__, "extensions": []})

    async def live(self, request: Request) -> Response:
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        ready = not self._state.why_not_ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model_ready(self, request: Request) -> Response:
        return self._refused(request) or await self.ready(request)

    async def describe(self, request: Request) -> Response:
        """Names, dtypes and shapes of the model."""
        if (refusal := self._refused(request)) is not None:
            return refusal
        version = self._state.models.current
        assert version is not None, "a model that is not loaded is refused"
        return JSONResponse(metadata(self._state.name, version.release.name, version.schema))

    async def infer(self, request: Request) -> Response:
        if (refusal := self._refused(request)) is not None:
            return refusal
        if BINARY in request.headers:
            return _error(400, "binary tensors are not supported; send JSON")
        return await self._state.answered(request, KSERVE)

    def _refused(self, request: Request) -> Response | None:
        """The response where the key is missing, or another model or version is asked for than the one that serves."""
        state, asked = self._state, request.path_params
        if not state.admits(request):
            return _error(401, REFUSAL)
        current = state.models.current
        if current is None:
            return _error(503, "no model is loaded")
        if asked["name"] != state.name:
            return _error(404, f"no model '{asked['name'][:100]}'; this server has '{state.name}'")
        if asked.get("version", current.release.name) != current.release.name:
            return _error(404, f"no version '{asked['version'][:100]}'; this server has '{current.release.name}'")
        return None


def _error(status: int, text: str) -> Response:
    return JSONResponse({"error": text}, status)
