"""Building blocks of the servers' OpenAPI 3.1 documents."""

from typing import Any

from armillary import __version__


def document(title: str, paths: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An OpenAPI document; `more` are its other top-level keys."""
    return {"openapi": "3.1.0", "info": {"title": title, "version": __version__}, "paths": paths} | more


def object_schema(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object whose properties are all required."""
    return {"type": "object", "properties": properties, "required": list(properties)} | more


def json_content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def responses(statuses: dict[int, str], schema: dict[str, Any]) -> dict[str, Any]:
    """Status → description, each with a JSON body of `schema`."""
    return {str(status): {"description": text, "content": json_content(schema)} for status, text in statuses.items()}
