"""Pronounceable names of runs: an adjective and an animal, as in quiet-otter.

There are 64 × 64 names, and an id begins with the date, so that a short name rarely occurs twice.
"""

import secrets
from collections.abc import Collection

ADJECTIVES = (
    "amber bold brave brief bright brisk calm clear clever crisp deft eager early even fair fleet fond "
    "frank free fresh gentle glad golden good grand green happy hardy honest humble jolly keen kind late light lively "
    "loyal lucid mellow mild modest neat noble patient plain polite proud quick quiet rapid ready rosy royal sage "
    "silent silver steady sunny swift tidy vivid warm wise witty"
)
ANIMALS = (
    "badger bear beaver bison bobcat buffalo camel caribou cat condor crane crow deer dolphin dove eagle egret elk "
    "ferret finch fox gazelle gecko goose hare hawk hedgehog heron hornet ibex ibis jackal jaguar kestrel kiwi "
    "koala lark lemur lion lynx marmot marten mole moose newt ocelot orca otter owl panda pelican pika puffin "
    "raven robin salmon seal sparrow stork swan tiger walrus wolf wren"
)


def new_name(taken: Collection[str]) -> str:
    """A name that is not taken, with a number where the words run out.

    From the system's randomness: jobs with the same seed of Python's generator must not choose the same name.
    """
    number = 1
    while True:
        for _ in range(64):
            name = f"{secrets.choice(ADJECTIVES.split())}-{secrets.choice(ANIMALS.split())}"
            name = name if number == 1 else f"{name}-{number}"
            if name not in taken:
                return name
        number += 1
