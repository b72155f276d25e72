"""Sketches of many documents in a temporary file, read a block at a time or a few at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import numpy as np

from pipeline.corpus.near_copies import BLOCK, SKETCH
from pipeline.errors import UserError

_PART = 1 << 13  # sketches that are read together where many of them are wanted
_MANY = 64


class SketchFile:
    """Takes sketches in any order. The file has no name, so it goes with the object."""

    def __init__(self) -> None:
        """Hold no sketch yet."""
        self.size = 0
        self._file = tempfile.TemporaryFile(prefix="seenset-sketches-")  # noqa: SIM115

    def append(self, sketches: np.ndarray) -> int:
        """Add sketches, uint8, (documents, 128); the place of the first of them.

        Raises:
            UserError: there is no space for temporary files.
        """
        begin = self.size
        try:
            self._file.write(np.ascontiguousarray(sketches).data)
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"no space for sketches in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to a larger disk"
            ) from None
        self.size += len(sketches)
        return begin

    def arranged(self, places: np.ndarray) -> FiledSketches:
        """The sketches of some places, int64, in that order."""
        return FiledSketches(self, places)

    def read(self, places: np.ndarray) -> np.ndarray:
        """The sketches of some places: uint8, (places, 128)."""
        if places.size and (np.diff(places) == 1).all():
            return self._range(int(places[0]), places.size)
        wanted, number = np.unique(places, return_inverse=True)
        if wanted.size and wanted[-1] - wanted[0] + 1 == wanted.size:
            return self._range(int(wanted[0]), wanted.size)[number]
        sketches = np.empty((wanted.size, SKETCH), dtype=np.uint8)
        part, begins = np.unique(wanted // _PART, return_index=True)
        for index, begin, end in zip(part, begins, np.append(begins, wanted.size)[1:], strict=True):
            some = wanted[begin:end]
            if some.size >= _MANY:
                sketches[begin:end] = self._range(int(index) * _PART, _PART)[some - index * _PART]
            else:
                sketches[begin:end] = [self._range(place, 1)[0] for place in some.tolist()]
        return sketches[number]

    def _range(self, begin: int, count: int) -> np.ndarray:
        data = os.pread(self._file.fileno(), count * SKETCH, begin * SKETCH)
        return np.frombuffer(data, dtype=np.uint8).reshape(-1, SKETCH)


class FiledSketches:
    """Sketches of a file in an order of their own: what `near_families` reads."""

    def __init__(self, file: SketchFile, places: np.ndarray) -> None:
        """Read the sketches of these places, int64, (documents,)."""
        self.file = file
        self.places = places

    def __len__(self) -> int:
        """How many documents there are."""
        return int(self.places.size)

    def blocks(self) -> Iterator[np.ndarray]:
        """All sketches in order, a block at a time."""
        for start in range(0, len(self), BLOCK):
            yield self.file.read(self.places[start : start + BLOCK])

    def take(self, documents: np.ndarray) -> np.ndarray:
        """The sketches of some documents: uint8, (some, 128)."""
        return self.file.read(self.places[documents])
