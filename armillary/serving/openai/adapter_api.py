"""Routes that load and unload LoRA adapters, as vLLM's server has them."""

from pathlib import Path
from typing import TypeVar

from armillary.serving.http.asgi import AsgiConnection, BodyLimits
from armillary.serving.http.problem import Problem, bad_request
from armillary.serving.openai.request_body import decode_body
from armillary.serving.openai.schemas import LoadAdapterRequest, UnloadAdapterRequest
from armillary.serving.openai.served_model import ServedModel

T = TypeVar("T", LoadAdapterRequest, UnloadAdapterRequest)


async def load_adapter(served: ServedModel, connection: AsgiConnection, bodies: BodyLimits) -> None:
    body = await _body(served, connection, bodies, LoadAdapterRequest)
    if body.lora_name == served.name:
        raise bad_request(f"'{body.lora_name}' is the model itself; give another name", "lora_name")
    if served.engine.state != "ready":
        raise served.engine.unavailable()
    await served.engine.adapters.load(body.lora_name, Path(body.lora_path))
    await connection.json(200, {"status": "loaded", "lora_name": body.lora_name})


async def unload_adapter(served: ServedModel, connection: AsgiConnection, bodies: BodyLimits) -> None:
    """Requests that use it end as they began."""
    body = await _body(served, connection, bodies, UnloadAdapterRequest)
    served.engine.adapters.unload(body.lora_name)
    await connection.json(200, {"status": "unloaded", "lora_name": body.lora_name})


async def _body(served: ServedModel, connection: AsgiConnection, bodies: BodyLimits, schema: type[T]) -> T:
    """Problem 403 where clients may not name folders of this machine."""
    if not served.serve.runtime_adapters:
        text = "adapters are not loaded through the API here; start with --set serve.runtime_adapters=true"
        raise Problem(403, text, code="forbidden")
    return decode_body(await connection.body(bodies), schema)
