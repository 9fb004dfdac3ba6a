"""The control groups of this process: its own and all visible ancestors, of version 1, 2 or both.

A limit holds for all groups below it, so a reader takes the minimum over the groups. In a container the groups above
its own are invisible; version 1 still reports their memory limit (`hierarchical_memory_limit`). psutil knows no
cgroups.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from armillary.machine.system_files import ROOT, text


@dataclass(frozen=True, kw_only=True)
class Group:
    """One control group that limits this process, of version 1 or 2; `name` is its path below the mount ('/',
    '/user.slice')."""

    folder: Path
    version: int
    name: str

    def read(self, file: str) -> str:
        """The text of one of its files, stripped; empty where the file is missing."""
        return text(self.folder / file).strip()

    def number(self, file: str) -> float | None:
        """A file of one number; None for 'max', '-1' and a missing file."""
        value = self.read(file)
        return float(value) if value.isdigit() else None

    def stat(self, file: str, key: str) -> float | None:
        """The number of a key in a file of 'key number' lines."""
        rows = (line.split() for line in self.read(file).splitlines())
        return next((float(row[1]) for row in rows if len(row) == 2 and row[0] == key), None)


def groups(controller: str, root: Path = ROOT) -> tuple[Group, ...]:
    """This process's group of a controller ('cpu', 'cpuset', 'memory') and its ancestors, innermost first."""
    unique = dict.fromkeys(group for mount in _mounts(controller, root) for group in _chain(mount))
    return tuple(unique) or tuple(_default_mounts(controller, root))


@dataclass(frozen=True)
class _Mount:
    """The mount of one hierarchy, and this process's group in it."""

    point: Path
    top: PurePosixPath
    own: PurePosixPath
    version: int


def _mounts(controller: str, root: Path) -> Iterator[_Mount]:
    """Lines of mountinfo: id parent dev root point options [tags] - type source super-options."""
    own = _own_paths(root)
    for line in text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if kind[0] == "cgroup2" else 1
        key = "" if version == 2 else controller
        if key in own and (version == 2 or controller in kind[2].split(",")):
            yield _Mount(root / fields[4].lstrip("/"), PurePosixPath(fields[3]), own[key], version)


def _own_paths(root: Path) -> dict[str, PurePosixPath]:
    """/proc/self/cgroup: controller -> path; version 2 has no controllers on its line and is ''."""
    paths: dict[str, PurePosixPath] = {}
    for line in text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths |= {name: PurePosixPath(path) for name in controllers.split(",")}
    return paths


def _chain(mount: _Mount) -> Iterator[Group]:
    """From the process's own group up to the mount point; only the mount point where the own group is invisible."""
    inside = mount.own.is_relative_to(mount.top) and ".." not in mount.own.parts
    below = mount.own.relative_to(mount.top) if inside else PurePosixPath()
    for path in (below, *below.parents) if below.parts else (below,):
        folder = mount.point / path
        if folder.is_dir():
            yield Group(folder=folder, version=mount.version, name=str(PurePosixPath("/") / path))


def _default_mounts(controller: str, root: Path) -> Iterator[Group]:
    """The usual mount points, for systems whose /proc does not list them."""
    for path, version in ((f"sys/fs/cgroup/{controller}", 1), ("sys/fs/cgroup", 2)):
        if (root / path).is_dir():
            yield Group(folder=root / path, version=version, name="/")
