"""What a client of Redis raises where Redis does not answer."""

from __future__ import annotations


def redis_errors() -> tuple[type[Exception], ...]:
    """Includes RuntimeError: uvloop raises it for a write to a connection that Redis has closed a moment before."""
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError, RuntimeError)
