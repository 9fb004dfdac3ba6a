"""Time of `data prepare` on one and two Ray workers and of the local command, on the same text: seconds and ratios.

.venv-ray/bin/python benchmarks/ray_prepare.py --megabytes 100
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import ray

from armillary.cluster.ray.ordered_map import ONE_THREAD, RayMap
from armillary.training.data.encode_parts import Mapped
from armillary.training.prepare_data import prepare

FILE_BYTES = 4_000_000


def write_text(folder: Path, num_bytes: int) -> None:
    """Sources of Python's library, again and again, with a number in front so that no two files are equal."""
    library = "".join(path.read_text(errors="ignore") for path in sorted(Path(os.__file__).parent.glob("*.py")))
    for number in range(-(-num_bytes // FILE_BYTES)):
        repeated = (f"# {number}\n{library}" * (FILE_BYTES // len(library) + 1))[:FILE_BYTES]
        (folder / f"{number:05}.py").write_text(repeated)


def timed(source: Path, out: Path, tokenizer: Path | None, mapped: Mapped | None) -> float:
    begin = time.monotonic()
    prepare(source, out, tokenizer=tokenizer, mapped=mapped)
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        write_text(folder / "text", asked.megabytes * 1_000_000)
        timed(folder / "text", folder / "first", None, None)  # trains the tokenizer that the others use
        tokenizer = folder / "first" / "tokenizer"
        local = timed(folder / "text", folder / "here", tokenizer, None)
        one, two = (on_workers(count, folder, tokenizer) for count in (1, 2))
    for way, seconds in (("local", local), ("1 worker", one), ("2 workers", two)):
        print(f"{way:9} {seconds:6.1f} s  {asked.megabytes / seconds:6.1f} MB/s")
    print(f"2 workers against 1: {one / two:.2f}x; against the local command: {local / two:.2f}x")


def on_workers(count: int, folder: Path, tokenizer: Path) -> float:
    ray.init(num_cpus=count, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ONE_THREAD})
    try:
        mapped = RayMap()
        list(mapped(import_tokenizer, range(4 * count)))  # workers are there
        return timed(folder / "text", folder / f"on-{count}", tokenizer, mapped)
    finally:
        ray.shutdown()


def import_tokenizer(part: int) -> None:
    from armillary.training.data import encode_parts  # noqa: F401


if __name__ == "__main__":
    main()
