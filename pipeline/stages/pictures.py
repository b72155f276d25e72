"""What the stages of pictures share: from the bytes of a picture to what a model is given of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.corpus.documents import Document
from pipeline.corpus.pictures import open_picture
from pipeline.models.opened import LanguageModel
from pipeline.models.pictures import PicturePrompt, picture_prompt
from pipeline.stages.base import Output, Window

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURE_WINDOW = Window(64, characters=16 << 20)
"""Pictures that are made ready at a time, and the bytes of their files: of large photographs a model's numbers take a
hundred times as much."""


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, decoded, and what a model is given of it."""

    document: Document
    picture: Image
    prompt: PicturePrompt


def shown_pictures(lm: LanguageModel, documents: list[Document], output: Output) -> Iterator[ShownPicture]:
    """Decode the pictures of documents; those that cannot be, or that leave a model no room for a word, are refused.

    One picture at a time: whoever keeps none of them holds the pixels of one.

    Args:
        lm: from `open_picture_model`.
        documents: with pictures.
        output: of the shard.
    """
    for document in documents:
        assert document.picture is not None
        try:
            picture = open_picture(document.picture)
        except ValueError as error:
            output.refuse(document, "undecodable", str(error))
            continue
        prompt = picture_prompt(lm, picture)
        if lm.max_tokens is not None and len(prompt.ids) >= lm.max_tokens:
            room = f"the picture and the instruction are {len(prompt.ids)} tokens, and the model has {lm.max_tokens}"
            output.refuse(document, "too_large", f"{room} positions")
            continue
        yield ShownPicture(document, picture, prompt)
