"""Sketches of many documents in a temporary file, read a part at a time."""

from __future__ import annotations

import itertools
import os
import tempfile

import numpy as np

from pipeline.corpus.near_copies import SKETCH
from pipeline.errors import UserError

_PART = 1 << 13  # sketches that are read together


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
        wanted, number = np.unique(places, return_inverse=True)
        sketches = np.empty((wanted.size, SKETCH), dtype=np.uint8)
        begins = np.unique(wanted // _PART, return_index=True)[1]
        for begin, end in itertools.pairwise([*begins, wanted.size]):
            some = wanted[begin:end]
            size = int(some[-1] - some[0] + 1) * SKETCH
            data = os.pread(self._file.fileno(), size, int(some[0]) * SKETCH)
            sketches[begin:end] = np.frombuffer(data, dtype=np.uint8).reshape(-1, SKETCH)[some - some[0]]
        return sketches[number]


class FiledSketches:
    """Sketches of a file in an order of their own: what `near_families` reads."""

    def __init__(self, file: SketchFile, places: np.ndarray) -> None:
        """Read the sketches of these places, int64, (documents,)."""
        self.file = file
        self.places = places

    def __len__(self) -> int:
        """How many documents there are."""
        return int(self.places.size)

    def __getitem__(self, documents: slice | np.ndarray) -> np.ndarray:
        """The sketches of some documents: uint8, (some, 128)."""
        return self.file.read(self.places[documents])
