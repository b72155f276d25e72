"""Pictures: from what a row holds to the bytes of one, what its head tells, and its pixels.

A picture travels as the bytes that the corpus has; it is decoded where a model or a test wants its pixels.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""What Pillow may take a file for: formats that run no other program."""

_ANIMATED = {"GIF", "PNG", "WEBP", "TIFF"}  # phones write JPEG files with a second picture in them: no animation

PICTURE_SKETCH = 128
"""Bytes of a picture's sketch, as many as of a text's."""

PICTURE_SKETCH_KIND = "dHash of 288 bits, 128 times 3 of them, or 128 colours in steps of 32, 3"
"""How sketches of pictures are made, for fingerprints."""

_HASH_SIDE = 12
"""Bits of a row and of a column of a hash."""

_PLAIN = 0.125
"""Share of a hash: with fewer ones or zeros, along rows and along columns, a picture has no pattern."""

Problem = tuple[str, str]
"""Reason and message why a row holds no picture."""


def picture_bytes(value: Any, folder: str, most: int) -> bytes | Problem:
    """The bytes of a picture.

    Args:
        value: of the row: bytes, {"bytes", "path"}, or a path beside the file that holds the row.
        folder: of that file, local or an fsspec URL; what lies outside of it is not read. Empty: there is none.
        most: bytes that are read of a file.
    """
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        value = file_beside(value, folder, most)
    if value is None:
        return "not_picture", "no picture in this row"
    if isinstance(value, tuple):
        return value
    if not isinstance(value, bytes):
        return "not_picture", f"{type(value).__name__}, not a picture"
    if len(value) > most:
        return "too_large", f"{len(value):,} bytes, more than limits.document_bytes, which is {most:,}"
    return value


def file_beside(name: str, folder: str, most: int) -> bytes | Problem:
    """The bytes of a file in a folder, or why they are not read.

    Args:
        name: a path in the folder.
        folder: local or an fsspec URL; what lies outside of it is not read. Empty: there is none.
        most: bytes that are read, and one more.
    """
    shown = repr(name if len(name) <= 200 else f"{name[:197]}...")
    if "://" in name or os.path.isabs(name) or "\0" in name or not folder:
        return "not_picture", f"{shown} is no path beside the file that names it: other places are not read"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "not_picture", f"{ascii(name)[:200]} is no name of a file"
    fs, root = fsspec.core.url_to_fs(folder)
    path = os.path.normpath(os.path.join(root, name))
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        root, path = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath([os.path.normpath(root), path]) != os.path.normpath(root):
        return "not_picture", f"{shown} leads out of the folder of the file that names it"
    try:
        with fs.open(path, "rb") as file:
            data: bytes = file.read(most + 1)
            return data
    except OSError as error:
        return "not_picture", f"cannot read {shown}: {error.strerror or ' '.join(str(error).split())}"


def picture_problem(data: bytes, pixels: int) -> Problem | None:
    """What the head of a picture says against it; None where it may be decoded. Nothing is decoded.

    Args:
        data: of the picture's file.
        pixels: that it may have.
    """
    from PIL import Image

    if not data:
        return "empty", "a picture of 0 bytes"
    try:
        with _opened(data) as image:
            width, height = image.size
            if width * height > pixels:
                return "too_large", f"{width} x {height} pixels, more than limits.picture_pixels, which is {pixels:,}"
            if not width * height:
                return "empty", f"{width} x {height} pixels"
            if image.mode in ("I", "F"):  # Pillow would make them white or black altogether
                return "undecodable", "its pixels are numbers of 32 bits, of which none says what is black or white"
            if getattr(image, "is_animated", False) and image.format in _ANIMATED:
                return "animated", f"{getattr(image, 'n_frames', 2)} frames, and one is asked about"
    except Image.DecompressionBombError as error:
        return "too_large", f"{str(error).split(',')[0]}, which Pillow has for all pictures"
    except Exception as error:  # readers of pictures raise whatever their parsers do
        return "undecodable", f"not a picture: {' '.join(str(error).split())[:200]}"
    return None


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of large pictures, and of odd metadata
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image


def open_picture(data: bytes) -> Image:
    """The pixels of a picture without a `picture_problem`: upright, RGB, of 16-bit grey the upper 8 bits.

    Raises:
        ValueError: it cannot be decoded to its end.
    """
    from PIL import Image, ImageOps

    try:
        with _opened(data) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):  # of which Pillow cuts all but the darkest off
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except Exception as error:  # as above
        raise ValueError(f"not a whole picture: {' '.join(str(error).split())[:200]}") from None


def picture_key(picture: Image) -> int:
    """A 64-bit key of a picture's size and pixels: equal pixels are one document, whatever file they were in."""
    digest = hashlib.blake2b(f"{picture.width} {picture.height} ".encode(), digest_size=8)
    digest.update(picture.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def picture_sketches(pictures: Sequence[Image]) -> list[bytes]:
    """Sketches of pictures, 128 bytes each, which `near_pairs` compares as those of texts.

    A byte holds 3 of the 288 bits of a perceptual hash (dHash, along rows and columns: whether a pixel of a grey
    thumbnail of 12 x 13 pixels is brighter than its neighbour), drawn once for all pictures. Two pictures whose hashes
    differ in a share d of their bits have about (1 - d)^3 of their bytes in common, unrelated ones an eighth:
    near-duplicates, from 0.8, differ in 7% of the bits at most.

    Where nearly all bits are equal, as of a picture of one colour, the hash says nothing. A byte is then one number of
    an 8 x 8 thumbnail in colour, in steps of 32: two such pictures are near-duplicates if these differ by 6 on average.
    """
    sketches = []
    for picture in pictures:
        grey = picture.convert("L")
        wide, high = _thumbnail(grey, _HASH_SIDE + 1, _HASH_SIDE), _thumbnail(grey, _HASH_SIDE, _HASH_SIDE + 1)
        rows, columns = wide[:, 1:] > wide[:, :-1], high[1:] > high[:-1]
        bits = np.concatenate([rows.ravel(), columns.ravel()]).astype(np.uint8)
        if any(_PLAIN <= float(half.mean()) <= 1 - _PLAIN for half in (rows, columns)):
            sketches.append(np.packbits(bits[_drawn_bits()], axis=1).tobytes())
        else:
            colours = np.asarray(picture.resize((8, 8)), dtype=np.int64).ravel()
            place, begin = _drawn_colours()
            # 1 to 9: bytes of the other kind are multiples of 32
            sketches.append(((colours[place] + begin) // 32 + 1).astype(np.uint8).tobytes())
    return sketches


def _thumbnail(grey: Image, width: int, height: int) -> np.ndarray:
    """A picture in grey, in so many pixels: uint8, (height, width)."""
    from PIL.Image import Resampling

    return np.asarray(grey.resize((width, height), Resampling.LANCZOS))


@cache
def _drawn_bits() -> np.ndarray:
    """Which bits of a hash make each byte of a sketch: int64, (128, 3)."""
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(2 * _HASH_SIDE * _HASH_SIDE)[:3] for _ in range(PICTURE_SKETCH)])


@cache
def _drawn_colours() -> tuple[np.ndarray, np.ndarray]:
    """Which number of a small thumbnail makes each byte of a plain picture's sketch, and where its steps begin.

    Two int64 arrays, (128,), the second in 0..31: a difference of d moves a share of d / 32 of the bytes.
    """
    rng = np.random.default_rng(2)
    return rng.permutation(8 * 8 * 3)[:PICTURE_SKETCH], rng.permutation(PICTURE_SKETCH) % 32
