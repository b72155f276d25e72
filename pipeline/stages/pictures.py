"""What the stages of pictures share: from the bytes of a picture to what a model is given of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.corpus.documents import Document
from pipeline.corpus.pictures import open_picture
from pipeline.models.opened import LanguageModel
from pipeline.models.pictures import PicturePrompt, picture_prompt
from pipeline.stages.base import Output

if TYPE_CHECKING:
    from PIL.Image import Image

WINDOW_PICTURES = 64
"""Pictures that are decoded at a time, at most."""


@dataclass(frozen=True, slots=True)
class ShownPicture:
    """A picture, decoded, and what a model is given of it."""

    document: Document
    picture: Image
    prompt: PicturePrompt


def shown_pictures(lm: LanguageModel, documents: list[Document], output: Output) -> list[ShownPicture]:
    """Decode the pictures of documents; those that cannot be, or that leave a model no room for a word, are refused.

    Args:
        lm: from `open_picture_model`.
        documents: with pictures.
        output: of the shard.
    """
    shown = []
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
        shown.append(ShownPicture(document, picture, prompt))
    return shown
