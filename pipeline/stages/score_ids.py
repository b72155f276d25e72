"""Documents that are given as token ids: a model at hand scores these ids, and no text is tokenised."""

from __future__ import annotations

from pipeline.detectors.base import FORWARD, Pass
from pipeline.models.beginnings import Tokens
from pipeline.models.tokens import repeated
from pipeline.stages.score import Scorer


class IdScorer(Scorer):
    """A scorer of token ids. What reads texts, as `zlib` does, reads what the target's tokenizer decodes them to."""

    reads_ids = True

    def tokenise(self, texts: list[str]) -> tuple[list[Tokens], list[str]]:
        """The ids of documents, cut to `max_tokens`, and the texts that these decode to.

        Args:
            texts: of the numbers of each document's ids, as `pipeline.corpus.documents.ids_text` writes them.
        """
        most, known = self.max_tokens, len(self.tokenizer)
        ids = [list(map(int, text.split(" ", most)[:most])) for text in texts]
        tokens = [Tokens(each, text.count(" ") >= most, len(text)) for each, text in zip(ids, texts, strict=True)]
        plain = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return tokens, [str(self.tokenizer.decode([one for one in each if one < known], **plain)) for each in ids]

    def tokenise_passes(self, kept: list[list[str]], ids: dict[Pass, list[list[int]]]) -> None:
        """Give every pass the ids themselves, or several copies of them."""
        for needed in self.passes:
            mark = self.models[needed.model].tokenizer.bos_token_id
            ids[needed] = (
                [repeated(each, self.max_tokens, mark) for each in ids[FORWARD]]
                if needed.text == "repeated"
                else ids[FORWARD]
            )
