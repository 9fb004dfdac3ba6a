"""The file of one rank in each checkpoint: written by the rank's writer process from its staging buffer."""

from armillary.store.manifest import FileEntry
from armillary.store.runs import Run
from armillary.training.checkpoint import save_plan
from armillary.training.checkpoint.commit import Instruction, Report
from armillary.training.checkpoint.disk_errors import plain_errors, write_error
from armillary.training.checkpoint.peer_copies import PeerCopies
from armillary.training.checkpoint.save_in_flight import SaveInFlight
from armillary.training.checkpoint.save_plan import SavePlan
from armillary.training.checkpoint.shard_writer import ShardWriter
from armillary.training.checkpoint.staging import StagingBuffer


class RankShard:
    """Made by the thread that uses it, with which the writer process ends."""

    def __init__(self, run: Run, rank: int, plan: SavePlan, buffer: StagingBuffer, peers: PeerCopies | None) -> None:
        self._run, self._rank, self._peers = run, rank, peers
        self.writer = ShardWriter.of(buffer, plan.places)

    def write(self, save: SaveInFlight, instruction: Instruction) -> Report:
        """In full, as a delta, or into the memory of this machine and a peer; what was written, with its checksums."""
        folder, base = instruction.folder, instruction.base
        peers = self._peers if save.in_memory else None
        if peers is not None:
            folder = peers.place(folder)
            folder.mkdir(parents=True, exist_ok=True)
        name = save_plan.file_name(self._rank, delta=base is not None)
        job = {"path": str(folder / name)}
        if base is not None:
            job["base"] = str(self._run.checkpoint(base) / save_plan.file_name(self._rank))
        with plain_errors(folder):
            try:
                done = self.writer.ask(job)
            finally:
                if peers is not None:
                    peers.swap_files(folder)
        if "error" in done:
            raise write_error(folder, done["errno"], done["error"])
        entry = FileEntry(bytes=done["bytes"], block_sha256=done["block_sha256"])
        places = tuple((offset, length) for offset, length in done.get("places", ()))
        return Report(files={name: entry}, random=save.random, places=places)

    def close(self, *, kill: bool = False) -> None:
        self.writer.close(kill=kill)
