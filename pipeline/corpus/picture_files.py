"""Pictures: their bytes from the value of a row, checks of the header, and pixels.

A picture is passed on as its encoded bytes; it is decoded where a model or a test needs its pixels.
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

from pipeline.corpus.links import is_special, leads_out
from pipeline.corpus.reasons import Reason
from pipeline.errors import error_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow may decode: those that run no other program."""

_ANIMATED = {"GIF", "PNG", "WEBP", "TIFF"}  # JPEG files of phones may contain a second picture, which is no animation

PICTURE_SKETCH = 128
"""Bytes of a picture's sketch, the same as for texts."""

PICTURE_SKETCH_KIND = "dHash of 288 bits, 128 times 3 of them, or 128 colours in steps of 32, 3"
"""Version of the sketches of pictures, for fingerprints."""

_HASH_SIDE = 12
"""Number of bits of a row and of a column of a hash."""

_PLAIN = 0.125
"""A picture is plain if the share of ones or zeros in its hash, by rows and by columns, is smaller."""

Problem = tuple[str, str]
"""Reason code and message for a row without a picture."""


def picture_bytes(value: Any, folder: str, most: int, follow: bool = False) -> bytes | Problem:
    """The bytes of a picture.

    Args:
        value: value of the row: bytes, {"bytes", "path"}, or a path relative to the file that holds the row.
        folder: folder of that file, a local path or fsspec URL; paths outside of it are not read. Empty: none.
        most: maximum bytes of a file.
        follow: whether links to regular files outside of the folder are followed.
    """
    if isinstance(value, dict):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, str):
        value = file_beside(value, folder, most, follow)
    if value is None:
        return Reason.NOT_PICTURE, "no picture in this row"
    if isinstance(value, tuple):
        return value
    if not isinstance(value, bytes):
        return Reason.NOT_PICTURE, f"{type(value).__name__}, not a picture"
    if len(value) > most:
        return Reason.TOO_LARGE, f"{len(value):,} bytes, more than limits.document_bytes, which is {most:,}"
    return value


def file_beside(name: str, folder: str, most: int, follow: bool = False) -> bytes | Problem:
    """The bytes of a file in a folder, or why they are not read.

    Args:
        name: path in the folder.
        folder: local path or fsspec URL; paths outside of it are not read. Empty: none.
        most: at most this many bytes plus one are read.
        follow: whether links to regular files outside of the folder are followed.
    """
    shown = repr(name if len(name) <= 200 else f"{name[:197]}...")
    if "://" in name or os.path.isabs(name) or "\0" in name or not folder:
        return Reason.NOT_PICTURE, f"{shown} is no path beside the file that names it: other places are not read"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return Reason.NOT_PICTURE, f"{ascii(name)[:200]} is no name of a file"
    fs, root = fsspec.core.url_to_fs(folder)
    path = os.path.normpath(os.path.join(root, name))
    if isinstance(fs, fsspec.implementations.local.LocalFileSystem):
        if leads_out(path, root) and (is_special(path) or not follow):
            return Reason.NOT_PICTURE, f"{shown} leads out of the folder of the file that names it"
        if os.path.exists(path) and not os.path.isfile(path):
            return Reason.NOT_PICTURE, f"{shown} is no regular file"
    if os.path.commonpath([os.path.normpath(root), path]) != os.path.normpath(root):
        return Reason.NOT_PICTURE, f"{shown} leads out of the folder of the file that names it"
    try:
        with fs.open(path, "rb") as file:
            data: bytes = file.read(most + 1)
            return data
    except OSError as error:
        return Reason.NOT_PICTURE, f"cannot read {shown}: {error.strerror or error_line(error)}"


def picture_problem(data: bytes, pixels: int) -> Problem | None:
    """Why a picture cannot be decoded, from its header; None if it can. The pixels are not decoded.

    Args:
        data: bytes of the picture's file.
        pixels: maximum number of pixels.
    """
    from PIL import Image

    if not data:
        return Reason.EMPTY, "a picture of 0 bytes"
    try:
        with _opened(data) as image:
            width, height = image.size
            if width * height > pixels:
                return (
                    Reason.TOO_LARGE,
                    f"{width} x {height} pixels, more than limits.picture_pixels, which is {pixels:,}",
                )
            if not width * height:
                return Reason.EMPTY, f"{width} x {height} pixels"
            if image.mode in ("I", "F"):  # Pillow would convert them to all white or all black
                return (
                    Reason.UNDECODABLE,
                    "its pixels are numbers of 32 bits, of which none says what is black or white",
                )
            if getattr(image, "is_animated", False) and image.format in _ANIMATED:
                return Reason.ANIMATED, f"{getattr(image, 'n_frames', 2)} frames, and one is asked about"
    except Image.DecompressionBombError as error:
        return Reason.TOO_LARGE, f"{str(error).split(',')[0]}, which Pillow has for all pictures"
    except Exception as error:  # decoders raise any exception of their parsers
        return Reason.UNDECODABLE, f"not a picture: {error_line(error, 200)}"
    return None


@contextmanager
def _opened(data: bytes) -> Iterator[Image]:
    from PIL import Image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures and unusual metadata
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            yield image


def open_picture(data: bytes) -> Image:
    """Decode a picture without a `picture_problem`: upright, RGB; for 16-bit grey the upper 8 bits.

    Raises:
        ValueError: it cannot be decoded completely.
    """
    from PIL import Image, ImageOps

    try:
        with _opened(data) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16"):  # Pillow clips all but the darkest values
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            return upright.convert("RGB")
    except Exception as error:  # as above
        raise ValueError(f"not a whole picture: {error_line(error, 200)}") from None


def picture_key(picture: Image) -> int:
    """A 64-bit key of a picture's size and pixels: equal pixels are one document in any file format."""
    digest = hashlib.blake2b(f"{picture.width} {picture.height} ".encode(), digest_size=8)
    digest.update(picture.tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def picture_sketches(pictures: Sequence[Image]) -> list[bytes]:
    """Sketches of pictures, 128 bytes each, which are compared like the sketches of texts.

    A byte holds 3 of the 288 bits of a perceptual hash (dHash, along rows and columns: whether a pixel of a grey
    thumbnail of 12 x 13 pixels is brighter than its neighbour), drawn once for all pictures. Two pictures whose hashes
    differ in a share d of their bits have about (1 - d)^3 of their bytes in common, unrelated pictures an eighth:
    near-duplicates (at least 0.8) differ in at most 7% of the bits.

    If nearly all bits are equal, as for a picture of one colour, the hash is not informative. A byte is then one value
    of an 8 x 8 colour thumbnail in steps of 32; two such pictures are near-duplicates if the mean difference is <= 6.
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
            # 1 to 9: bytes of plain pictures are multiples of 32
            sketches.append(((colours[place] + begin) // 32 + 1).astype(np.uint8).tobytes())
    return sketches


def _thumbnail(grey: Image, width: int, height: int) -> np.ndarray:
    """Grey thumbnail of a picture: uint8, (height, width)."""
    from PIL.Image import Resampling

    return np.asarray(grey.resize((width, height), Resampling.LANCZOS))


@cache
def _drawn_bits() -> np.ndarray:
    """The bits of a hash in each byte of a sketch: int64, (128, 3)."""
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(2 * _HASH_SIDE * _HASH_SIDE)[:3] for _ in range(PICTURE_SKETCH)])


@cache
def _drawn_colours() -> tuple[np.ndarray, np.ndarray]:
    """The value of the small thumbnail in each byte of a plain picture's sketch, and the offset of its steps.

    Two int64 arrays, (128,), the second in 0..31: a difference of d changes a share of d / 32 of the bytes.
    """
    rng = np.random.default_rng(2)
    return rng.permutation(8 * 8 * 3)[:PICTURE_SKETCH], rng.permutation(PICTURE_SKETCH) % 32
