"""Which files below some folders a process opens: by inotify, which sees every library, or by strace."""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

IN_OPEN, IN_ISDIR, IN_NONBLOCK = 0x20, 0x40000000, 0o4000
_EVENT = struct.Struct("iIII")


class NoWatchError(Exception):
    """This machine cannot watch files in this way."""


class Inotify:
    """Watches for files that any process opens below folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        if not hasattr(library, "inotify_init1"):
            raise NoWatchError("the C library has no inotify")
        self._descriptor = library.inotify_init1(IN_NONBLOCK)
        if self._descriptor < 0:
            raise NoWatchError(f"inotify: {os.strerror(ctypes.get_errno())}")
        self._places: dict[int, Path] = {}
        for top in folders:
            for place, _, _ in os.walk(top):
                watch = library.inotify_add_watch(self._descriptor, os.fsencode(place), IN_OPEN)
                if watch < 0:
                    raise NoWatchError(f"inotify: {os.strerror(ctypes.get_errno())}")
                self._places[watch] = Path(place)

    def opened(self) -> set[Path]:
        """Files opened since the start, and an end of the watch."""
        found, data = set(), b""
        while True:
            try:
                data += os.read(self._descriptor, 1 << 16)
            except BlockingIOError:
                break
        os.close(self._descriptor)
        while data:
            watch, mask, _, length = _EVENT.unpack_from(data)
            name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
            data = data[_EVENT.size + length :]
            if watch < 0:
                raise NoWatchError("inotify lost events")
            if name and not mask & IN_ISDIR:
                found.add(self._places[watch] / os.fsdecode(name))
        return found


def opened_by(command: Sequence[str], folders: Sequence[Path], tool: str = "inotify") -> set[Path]:
    """The files below folders that a command opens.

    Args:
        command: program and arguments; it must succeed.
        folders: folders of files, links resolved.
        tool: inotify or strace.

    Raises:
        NoWatchError: this machine does not have the tool, or does not permit it.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if tool == "inotify":
        watch = Inotify(folders)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return watch.opened()
    return _traced(command, folders, environment)


def _traced(command: Sequence[str], folders: Sequence[Path], environment: dict[str, str]) -> set[Path]:
    strace = shutil.which("strace")
    if strace is None:
        raise NoWatchError("strace is not installed")
    if subprocess.run([strace, "-f", "true"], capture_output=True, check=False).returncode:
        raise NoWatchError("strace may not trace here")
    log = folders[0].parent / "strace.log"
    options = ["-f", "-qq", "-e", "trace=open,openat,openat2", "-o", str(log)]
    result = subprocess.run([strace, *options, *command], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = set()
    for line in log.read_text(errors="replace").splitlines():
        match = re.search(r'open(?:at2?)?\((?:AT_FDCWD, )?"([^"]+)", (.*)', line)
        if match is None or " = -1 " in match[2]:
            continue
        path = Path(os.path.realpath(match[1]))  # "<unfinished ...>", if another thread was at work, counts as opened
        if "O_DIRECTORY" not in match[2] and path.is_file() and any(path.is_relative_to(top) for top in folders):
            found.add(path)
    return found
