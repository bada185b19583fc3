"""A bucket that hosts mount, as gcsfuse shows it: each mount is a FUSE file system over the same objects in memory.

    python -m tests.bucket_mounts [gcsfuse's options] LOG MOUNT [MOUNT ...]

The model follows gcsfuse's documentation and its source (3.x):

- A new or changed file is another object after `close` (or `fsync`, without streaming writes), if nobody changed that
  object meanwhile; otherwise the writer gets ESTALE. Readers of an older generation get ESTALE.
- Names and sizes are remembered for the seconds of the metadata cache. The defaults are those that gcsfuse chooses for
  TPU hosts: for ever.
- Folders are renamed at once in a hierarchical bucket. In a flat one they are not, with a limit of 0.
- Hard links and locks between hosts do not exist; the kernel keeps locks to one host.

Each request of the kernel is a line of LOG: mount, operation, name. A line "lose" on standard input loses the hosts
with what they had not sent, and mounts the bucket again; at its end, all is unmounted.
"""

import argparse
import ctypes
import errno
import itertools
import math
import os
import stat
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_NAMES = """
- lookup forget getattr setattr readlink symlink - mknod mkdir unlink rmdir rename link open read write statfs release -
fsync setxattr getxattr listxattr removexattr flush init opendir readdir releasedir fsyncdir getlk setlk setlkw access
create interrupt bmap destroy ioctl poll notify_reply batch_forget fallocate readdirplus rename2 lseek copy_file_range
"""
OPERATIONS = dict(enumerate(_NAMES.split()))
"""Requests of the kernel, by the number in their header (linux/fuse.h)."""
HEADER = struct.Struct("<IIQQIIIHH")
LIBC = ctypes.CDLL(None, use_errno=True)
NAMED = {"lookup": 0, "unlink": 0, "rmdir": 0, "mkdir": 8, "rename": 8, "create": 16}
"""Requests about a name in a folder, and where in the request it is."""
SIZE = 1 << 3
"""Bit of a setattr that changes the size; gcsfuse takes a time of change too, and ignores the rest."""


def options(words: list[str]) -> argparse.Namespace:
    """gcsfuse's options that change what a program sees; the defaults are those of a TPU host."""

    def switch(text: str) -> bool:
        return {"true": True, "false": False}[text]

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--metadata-cache-ttl-secs", type=float, default=-1)
    parser.add_argument("--metadata-cache-negative-ttl-secs", type=float, default=0)
    parser.add_argument("--enable-streaming-writes", type=switch, default=True)
    parser.add_argument("--rename-dir-limit", type=int, default=200000)
    parser.add_argument("--flat", action="store_true", help="a bucket without a hierarchical namespace")
    parser.add_argument("log", type=Path)
    parser.add_argument("mounts", type=Path, nargs="+")
    return parser.parse_args(words)


class Object(NamedTuple):
    generation: int
    content: bytes
    changed: float


class Bucket:
    """Objects; one whose name ends with a slash is a folder."""

    def __init__(self):
        self.objects: dict[str, Object] = {}
        self.lock = threading.RLock()
        self._generations = itertools.count(1)

    def write(self, name: str, content: bytes, generation: int | None) -> Object:
        """Replaces that generation, None for none; another one is somebody else's."""
        here = self.objects.get(name)
        if (here and here.generation) != generation:
            raise OSError(errno.ESTALE, "changed meanwhile")
        self.objects[name] = Object(next(self._generations), content, time.time())
        return self.objects[name]

    def below(self, folder: str) -> list[str]:
        return [name for name in self.objects if name.startswith(folder) and name != folder]

    def move(self, old: str, new: str) -> None:
        """Moves an object, or a folder with all that is below it."""
        for name in [old, *(self.below(old) if old.endswith("/") else ())]:
            self.objects[new + name.removeprefix(old)] = self.objects.pop(name)


class Node:
    """An inode: a folder, or one generation of an object with what was written to it since."""

    def __init__(self, number: int, name: str, source: Object | None = None):
        self.number, self.name, self.source = number, name, source
        self.is_folder = not name or name.endswith("/")
        self.content: bytearray | None = None
        self.local = self.streamed = self.unlinked = False

    @property
    def size(self) -> int:
        if self.content is not None:
            return len(self.content)
        return len(self.source.content) if self.source else 0


class Mount:
    """One host's view of a bucket."""

    def __init__(self, bucket: Bucket, path: Path, chosen: argparse.Namespace, log):
        self._bucket, self._path, self._log, self._chosen = bucket, path, log, chosen
        ttl = [chosen.metadata_cache_ttl_secs, chosen.metadata_cache_negative_ttl_secs]
        self._ttl, self._negative_ttl = (math.inf if seconds < 0 else seconds for seconds in ttl)
        self._numbers = itertools.count(2)
        self._nodes = {1: Node(1, "")}
        self._local: dict[str, Node] = {}
        self._nodes_by_name: dict[str, Node] = {}
        self._cache: dict[str, tuple[float, Object | None]] = {}
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        path.mkdir(parents=True, exist_ok=True)
        mode = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if LIBC.mount(b"bucket", bytes(path), b"fuse", 0, mode.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))

    def unmount(self) -> None:
        """Break the connection to the kernel: what is not an object is lost."""
        for how in (1, 2):  # MNT_FORCE, MNT_DETACH
            LIBC.umount2(bytes(self._path), how)

    def serve(self) -> None:
        """Answer the kernel until it unmounts."""
        with suppress(OSError):
            while True:
                request = os.read(self._device, (1 << 20) + 4096)
                _, code, unique, number, *_ = HEADER.unpack_from(request)
                operation, body = OPERATIONS.get(code, str(code)), request[HEADER.size :]
                if operation in ("forget", "batch_forget", "interrupt"):
                    continue
                with self._bucket.lock:
                    try:
                        node = self._nodes.get(number, self._nodes[1])
                        handler = getattr(self, f"_{operation}", None)
                        child = body[NAMED[operation] :].split(b"\0")[0].decode() if operation in NAMED else ""
                        self._log.write(f"{self._path.name} {operation} {node.name}{child}\n")
                        if handler is None:
                            raise OSError(errno.ENOSYS, "not implemented")
                        error, answer = 0, handler(node, body) or b""
                    except OSError as failed:
                        error, answer = -failed.errno, b""
                os.write(self._device, struct.pack("<IiQ", 16 + len(answer), error, unique) + answer)

    # Names

    def _find(self, name: str) -> Node | None:
        """The inode of a name, as far as this host knows."""
        if name in self._local:
            return self._local[name]
        for place in (name + "/", name):
            if (seen := self._stat(place)) is not None:
                node = self._nodes_by_name.get(place)
                if node is None or node.unlinked or (node.source and node.source.generation) != seen.generation:
                    node = self._nodes_by_name[place] = self._new(place, seen)
                return node
        return None

    def _stat(self, name: str) -> Object | None:
        """Return the metadata of a name from this host's cache, or from the bucket."""
        expires, seen = self._cache.get(name, (0.0, None))
        if expires <= time.monotonic():
            seen = self._bucket.objects.get(name)
            self._remember(name, seen)
        return seen

    def _remember(self, name: str, seen: Object | None) -> None:
        self._cache[name] = time.monotonic() + (self._negative_ttl if seen is None else self._ttl), seen

    def _new(self, name: str, source: Object | None = None) -> Node:
        node = Node(next(self._numbers), name, source)
        self._nodes[node.number] = node
        return node

    def _child(self, folder: Node, name: bytes) -> Node:
        if (node := self._find(folder.name + name.rstrip(b"\0").decode())) is None:
            raise OSError(errno.ENOENT, "no such name")
        return node

    # Contents

    def _changing(self, node: Node) -> bytearray:
        """Return the content of a file that is not yet an object."""
        if node.content is None:
            self._check(node)
            node.streamed = not node.size and self._chosen.enable_streaming_writes
            node.content = bytearray(node.source.content if node.source else b"")
        return node.content

    def _check(self, node: Node) -> None:
        here = self._bucket.objects.get(node.name)
        if node.source and (here is None or here.generation != node.source.generation):
            raise OSError(errno.ESTALE, "another generation")

    def _publish(self, node: Node) -> None:
        if node.content is None or node.unlinked:
            return
        try:
            node.source = self._bucket.write(node.name, bytes(node.content), node.source and node.source.generation)
        finally:
            self._local.pop(node.name, None)
        self._remember(node.name, node.source)
        self._nodes_by_name[node.name] = node
        node.content, node.local = None, False

    # Answers

    def _attributes(self, node: Node) -> bytes:
        seconds = int(node.source.changed if node.source else time.time())
        mode = stat.S_IFDIR | 0o755 if node.is_folder else stat.S_IFREG | 0o644
        times, owner = (seconds,) * 3, (os.getuid(), os.getgid())
        return struct.pack("<6Q10I", node.number, node.size, 0, *times, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)

    def _valid(self) -> int:
        return int(min(self._ttl, 1e6))

    def _entry(self, node: Node) -> bytes:
        return struct.pack("<4Q2I", node.number, 0, 0, self._valid(), 0, 0) + self._attributes(node)

    def _init(self, node, body):
        kept = 1 << 5 | 1 << 22  # big writes, of as many pages as follow
        sizes = struct.pack("<4I2H2I2HI7I", 7, 31, 1 << 17, kept, 16, 12, 1 << 20, 1, 256, 0, 0, *[0] * 7)
        return sizes

    def _lookup(self, node, body):
        return self._entry(self._child(node, body))

    def _getattr(self, node, body):
        return struct.pack("<QII", self._valid(), 0, 0) + self._attributes(node)

    def _setattr(self, node, body):
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & SIZE and not node.is_folder:
            content = self._changing(node)
            content[size:] = b"\0" * max(0, size - len(content))
        return self._getattr(node, body)

    def _create(self, node, body):
        name = node.name + body[16:].rstrip(b"\0").decode()
        made = self._local[name] = self._new(name)
        made.local, made.content, made.streamed = True, bytearray(), self._chosen.enable_streaming_writes
        return self._entry(made) + struct.pack("<QII", made.number, 2, 0)  # 2: keep the page cache

    def _open(self, node, body):
        return struct.pack("<QII", node.number, 2, 0)

    _opendir = _open

    def _read(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        if node.content is not None:
            if node.streamed:
                self._publish(node)
            else:
                return bytes(node.content[offset : offset + size])
        self._check(node)
        return node.source.content[offset : offset + size]

    def _write(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        content = self._changing(node)
        content[len(content) :] = b"\0" * max(0, offset - len(content))
        content[offset : offset + size] = body[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def _flush(self, node, body):
        self._publish(node)

    def _fsync(self, node, body):
        if not node.streamed:
            self._publish(node)

    def _release(self, node, body):
        pass

    _releasedir = _release

    def _readdir(self, node, body):
        _, offset, size = struct.unpack_from("<QQI", body)
        local = {name for name in self._local if name.startswith(node.name)}
        inside = {name.removeprefix(node.name) for name in local | {*self._bucket.below(node.name)}}
        names = sorted(name for name in inside if "/" not in name[:-1])
        answer = b""
        for position, name in enumerate(names[offset:], offset + 1):
            kind, raw = (4 if name.endswith("/") else 8), name.rstrip("/").encode()
            entry = struct.pack("<QQII", position + 1, position, len(raw), kind) + raw
            entry += b"\0" * (-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _mkdir(self, node, body):
        name = node.name + body[8:].rstrip(b"\0").decode() + "/"
        if name in self._bucket.objects:
            raise OSError(errno.EEXIST, "is there")
        self._remember(name, self._bucket.write(name, b"", None))
        return self._entry(self._find(name[:-1]))

    def _unlink(self, node, body):
        child = self._child(node, body)
        child.unlinked = True
        if self._local.pop(child.name, None) is None:
            self._bucket.objects.pop(child.name, None)
            self._remember(child.name, None)

    def _rmdir(self, node, body):
        self._remove_folder(self._child(node, body).name)

    def _remove_folder(self, name):
        if self._bucket.below(name) or any(other.startswith(name) for other in self._local):
            raise OSError(errno.ENOTEMPTY, "not empty")
        self._bucket.objects.pop(name, None)
        self._remember(name, None)

    def _rename(self, node, body):
        old_name, new_name, _ = body[8:].split(b"\0")
        child, folder = self._child(node, old_name), self._nodes[struct.unpack_from("<Q", body)[0]]
        old, new = child.name, folder.name + new_name.decode()
        if child.is_folder:
            new += "/"
            if any(name.startswith(old) for name in self._local):
                raise OSError(errno.ENOTSUP, "open files")
            if self._chosen.flat and len(self._bucket.below(old)) > self._chosen.rename_dir_limit:
                raise OSError(errno.EMFILE, "too many objects")
            if new in self._bucket.objects:
                self._remove_folder(new)
        else:
            self._publish(child)
            self._check(child)
        self._bucket.move(old, new)
        for name in self._cache.keys() & {old, *(n for n in self._cache if child.is_folder and n.startswith(old))}:
            del self._cache[name]
        self._remember(new, self._bucket.objects[new])

    def _statfs(self, node, body):
        return struct.pack("<5Q4I6I", *[1 << 40] * 5, 4096, 255, 4096, 0, *[0] * 6)

    def _destroy(self, node, body):
        pass


def main() -> None:
    chosen = options(sys.argv[1:])
    bucket = Bucket()
    with chosen.log.open("w", buffering=1) as log:
        while True:
            mounts = [Mount(bucket, path, chosen, log) for path in chosen.mounts]
            threads = [threading.Thread(target=mount.serve) for mount in mounts]
            for thread in threads:
                thread.start()
            print("mounted", flush=True)
            goes_on = sys.stdin.readline() == "lose\n"
            for mount in mounts:
                mount.unmount()
            for thread in threads:
                thread.join()
            if not goes_on:
                return


if __name__ == "__main__":
    main()
