"""`@uncompiled`: a function that a compiler calls as it is and never looks into.

Like torch.compiler.disable, which imports the whole compiler as soon as a module with such a function is read: about a
second of every process. This one imports it when such a function is first called.
"""

from __future__ import annotations

from torch._compile import _disable_dynamo as uncompiled

__all__ = ["uncompiled"]
