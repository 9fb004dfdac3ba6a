"""One rank of an engine on two hosts: `python -m tests.services.engine_rank FOLDER ROUNDS`, with torchrun's variables.

Rank 0 prints the tokens of each round as JSON, and how it ends where the other rank is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time

from armillary.engine.llm import LLM
from armillary.engine.request.sampling_params import SamplingParams
from armillary.errors import ArmillaryError
from armillary.parallel.world import join_world
from armillary.spec.tables.serve import Serve

TABLE = Serve(block_tokens=4, kv_bytes=200_000, max_running=4, dtype="fp32")
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [20, 21, 22, 23]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def main() -> None:
    folder, rounds = sys.argv[1], int(sys.argv[2])
    with join_world("cpu", timeout_s=60) as world:
        llm = LLM(folder, TABLE, world=world)
        if world.rank:
            print("following", os.getpid(), flush=True)
            llm.follow()
            return
        for _ in range(rounds):
            try:
                print(json.dumps([made.tokens for made in llm.generate(PROMPTS, GREEDY)]), flush=True)
            except (ArmillaryError, RuntimeError) as error:
                print(f"ended: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                os._exit(3)
            time.sleep(0.2)
        llm.close()


if __name__ == "__main__":
    main()
