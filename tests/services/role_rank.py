"""One rank of a prefill or decode server: `python -m tests.services.role_rank ROLE FOLDER ADDRESS OVER`.

With torchrun's variables. The decode server's first rank prints its tokens and gauges as JSON; blocks go over the
network alone.
"""

from __future__ import annotations

import json
import sys

from tests.engine.disaggregation.test_ranks import part


def main() -> None:
    answer = part(*sys.argv[1:], "sent")
    if isinstance(answer, tuple):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
