"""Looks for byte strings in everything that processes hold: memory, memfds, shared files. Needs root.

Only pages that are there are read (proc(5), pagemap): a daemon reserves far more than it uses. What several processes
map is searched once, as the file that it is (proc(5), map_files).
"""

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

PAGE = os.sysconf("SC_PAGE_SIZE")
CHUNK = 1 << 24
OVERLAP = 256  # longer than anything that is looked for
_SHORTEST = 24
_THERE = np.uint64(3 << 62)  # pagemap: present, or in swap
_OF_A_FILE = np.uint64(1 << 61)  # or shared: that is searched as the file that it is
_ABOVE_USER = 1 << 47  # vsyscall and what else the kernel shows there


def needles(words: list[str], ids: list[int], blocks: list[bytes]) -> dict[str, bytes]:
    """What to look for, by what it is: pieces, so that a remainder is found as well as a whole.

    Args:
        words: of the secret; a piece is three.
        ids: its tokens; a piece is 24.
        blocks: KV blocks that were computed of nothing else; pieces of several layers, of keys and of values.
    """
    found = {}
    for at in range(0, len(words) - 2, 3):
        piece = " ".join(words[at : at + 3])
        found[f"words {at}: text"] = piece.encode()
        found[f"words {at}: utf-16"] = piece.encode("utf-16-le")
    for at in range(0, len(ids) - 23, 24):
        some = ids[at : at + 24]
        found[f"ids {at}: varint"] = b"".join(map(_varint, some))
        for code, bits in (("H", 16), ("I", 32), ("Q", 64)):
            found[f"ids {at}: {bits} bits"] = struct.pack(f"<24{code}", *some)
    for number, block in enumerate(blocks):
        for part in range(8):
            values = block[len(block) // 8 * part :][:64]
            if len(set(values)) > 16:
                found[f"kv: block {number}, part {part}"] = values
    return found


class _Sieve:
    """Finds any of many needles in one pass.

    Wherever a needle lies, two aligned words of 8 bytes are inside it, at one of eight places. Their hashes, eight for
    each needle, are looked for; what hashes alike is compared.
    """

    _FACTORS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], np.uint64)
    _SHIFT = np.uint64(64 - 22)

    def __init__(self, wanted: Mapping[str, bytes]) -> None:
        assert all(_SHORTEST <= len(needle) < OVERLAP for needle in wanted.values())
        self._marked = np.zeros(1 << 22, bool)
        self._places: dict[int, list[tuple[str, bytes, int]]] = {}
        for name, needle in wanted.items():
            for place in range(8):
                key = int(self._hashes(needle[place : place + 16])[0])
                self._marked[key] = True
                self._places.setdefault(key, []).append((name, needle, place))

    def _hashes(self, data: bytes) -> np.ndarray:
        words = np.frombuffer(data, np.uint64, len(data) // 8)
        with np.errstate(over="ignore"):
            return (words[:-1] * self._FACTORS[0] + words[1:] * self._FACTORS[1]) >> self._SHIFT

    def find(self, data: bytes) -> set[str]:
        """Names of the needles that are in `data`, which begins at a multiple of 8."""
        found: set[str] = set()
        if len(data) < 16:
            return found
        hashes = self._hashes(data)
        for word in np.flatnonzero(self._marked[hashes]).tolist():
            for name, needle, place in self._places[int(hashes[word])]:
                start = word * 8 - place
                if start >= 0 and data.startswith(needle, start):
                    found.add(name)
        return found


@dataclass
class Findings:
    """What a search has found, and what it has looked at.

    Attributes:
        hits: place → names of what was found there.
        memfds: names of the memfds that were searched.
        searched: bytes.
    """

    hits: dict[str, set[str]] = field(default_factory=dict)
    memfds: list[str] = field(default_factory=list)
    searched: int = 0

    def kinds(self, place: str) -> set[str]:
        """What was found in places whose name has `place` in it: "words", "ids", "kv"."""
        return {name.split()[0].rstrip(":") for where, names in self.hits.items() if place in where for name in names}


class Search:
    """One look at some processes and files.

    Args:
        wanted: from `needles`.
    """

    def __init__(self, wanted: Mapping[str, bytes]) -> None:
        self.findings = Findings()
        self._sieve = _Sieve(wanted)
        self._seen: set[tuple[int, int]] = set()

    def processes(self, processes: Iterable[psutil.Process]) -> None:
        """Searches what each holds: open memfds, mapped shared memory, and memory of its own."""
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                place = f"{process.pid} {' '.join(process.cmdline())[:160]}"
                for entry in list(Path(f"/proc/{process.pid}/fd").iterdir()):
                    with contextlib.suppress(OSError):
                        if "memfd:" in (name := str(entry.readlink())):
                            self._file(entry, f"{place}, {name}", name)
                self._memory(process.pid, place)

    def files(self, paths: Iterable[Path]) -> None:
        """Searches regular files."""
        for path in paths:
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    self._file(path, str(path), "")

    def text(self, text: str, place: str) -> None:
        """Searches a text."""
        data = text.encode()
        self._pieces(lambda offset: data[offset : offset + CHUNK], place)

    def _file(self, path: Path, place: str, memfd: str) -> None:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) in self._seen:
                return
            self._seen.add((status.st_dev, status.st_ino))
            if memfd:
                self.findings.memfds.append(memfd)
            self._pieces(lambda offset: os.pread(file.fileno(), CHUNK, offset), place)

    def _memory(self, pid: int, place: str) -> None:
        own = []
        for start, end, name in _mappings(pid):
            shared = Path(f"/proc/{pid}/map_files/{start:x}-{end:x}")
            if "memfd:" in name or name.startswith(("/dev/shm/", "/dev/zero", "/SYSV")):
                with contextlib.suppress(OSError):
                    self._file(shared, f"{place}, {name}", name if "memfd:" in name else "")
            else:
                own.append((start, end))
        with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
            for start, end in _present(pid, own):

                def read(offset: int, start: int = start, end: int = end) -> bytes:
                    with contextlib.suppress(OSError):
                        return os.pread(memory.fileno(), min(CHUNK, end - start - offset), start + offset)
                    return b""  # it has gone meanwhile

                self._pieces(read, place)

    def _pieces(self, read: Callable[[int], bytes], place: str) -> None:
        offset = 0
        while piece := read(offset):
            self.findings.searched += len(piece)
            if found := self._sieve.find(piece):
                self.findings.hits.setdefault(place, set()).update(found)
            offset += len(piece) - OVERLAP if len(piece) == CHUNK else len(piece)


def _varint(number: int) -> bytes:
    """As protobuf writes it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _mappings(pid: int) -> Iterator[tuple[int, int, str]]:
    """Start, end and name of each mapping that can be read."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if rights[0] == "r" and end <= _ABOVE_USER and not "".join(name).startswith("[v"):
            yield start, end, "".join(name)


def _present(pid: int, mappings: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Runs of pages that are there and nobody's but this process's, over the borders of mappings."""
    run = (0, 0)
    with Path(f"/proc/{pid}/pagemap").open("rb", 0) as pagemap:
        for start, end in mappings:
            for first in range(start, end, PAGE << 20):
                count = min(end - first, PAGE << 20) // PAGE
                entries = np.frombuffer(os.pread(pagemap.fileno(), count * 8, first // PAGE * 8), np.uint64)
                there = ((entries & _THERE) != 0) & ((entries & _OF_A_FILE) == 0)
                edges = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0, append=0))
                for begin, stop in edges.reshape(-1, 2).tolist():
                    begin_at, stop_at = first + begin * PAGE, first + stop * PAGE
                    if run[1] == begin_at:
                        run = (run[0], stop_at)
                    else:
                        if run[1]:
                            yield run
                        run = (begin_at, stop_at)
    if run[1]:
        yield run
