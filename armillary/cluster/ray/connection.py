"""The connection to a Ray cluster, made once per process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from armillary.cluster.commands import TargetFailed
from armillary.errors import missing, one_line

NAMESPACE = "armillary"
"""in which the actors of jobs have their names"""


def connect(address: str, *, environment: Mapping[str, str] | None = None) -> Any:
    """The package ray, connected; workers get the environment variables."""
    try:
        import ray
    except ModuleNotFoundError:
        raise missing("ray", "--on ray", "ray") from None
    if ray.is_initialized():
        return ray
    settings = {"env_vars": dict(environment)} if environment else {}
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            runtime_env=settings,
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        where = f"at {address}" if address else "here"
        raise TargetFailed(
            f"no Ray cluster answers {where} ({one_line(error, 200)}); try ray status there, or another address"
        ) from None
    return ray
