"""A commented starter configuration of a trial for the files of a folder."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.yaml import Written
from pipeline.corpus.discovery import DataFiles
from pipeline.plan.starter import (
    Source,
    Starter,
    detectors_setting,
    find_data,
    folder_contents,
    joined,
    model_setting,
    one_kind,
    selection_setting,
    source_notes,
    source_settings,
    takes_pictures,
    whole_file,
)
from pipeline.plan.starter_text import OTHER_KIND
from pipeline.trial.config import ContaminationConfig, TrialConfig

_PREFERRED = ("unseen", None, "audit")
"""Roles that the model has probably not seen, in order of preference; role seen is never used."""


def trial_starter(folder: str) -> Starter:
    """The starter configuration for a trial with the data in a folder.

    Raises:
        UserError: no such folder, or no data in it.
    """
    data = find_data(folder)
    texts, pictures = one_kind(data.files)
    pictured = takes_pictures(texts, pictures)
    # a picture without a caption cannot be trained on
    source = _documents([one for one in pictures if one.caption] if pictured else texts)
    fields, contamination = TrialConfig.model_fields, ContaminationConfig.model_fields
    model, model_guess = model_setting(folder, pictured)
    if source is None:
        seen = "the documents here are called seen, and a trial needs some that the model has not seen"
        note = f"Missing: {'pictures with captions that the model has not seen' if pictured else seen}."
        documents = Written("documents", [Written("path", "PATH")], (note,), off=True)
    else:
        documents = Written("documents", source_settings(source), tuple(source_notes(source)))
    settings = [
        Written("run", "runs/trial"),
        Written("model", model),
        documents,
        Written("contaminate", [Written(key, contamination[key].default) for key in ("share", "method", "epochs")]),
        Written("models", fields["models"].default),
        Written("repeats", fields["repeats"].default),
        detectors_setting(TrialConfig, pictured),
        Written("selections", (selection_setting("members", pictured),)),
        Written("seed", fields["seed"].default),
    ]
    head = (
        "A trial: is the guarantee kept? Documents that the model has not seen are trained into it, it is audited, and "
        "the answer is compared with the truth."
    )
    guesses = () if source is None else (f"documents: {', '.join(source.paths)}",)
    missing = ("add documents: {path: ...}, documents that the model has not seen",) if source is None else ()
    text = whole_file(TrialConfig, "trial", head, ("trial",), settings, data)
    taken = () if source is None else (*source.files, *source.left_out)
    unused = [(one, _not_taken(one, pictured)) for one in data.files if one not in taken]
    contents = folder_contents(data, {} if source is None else {"documents": source}, unused)
    return Starter("trial.yaml", TrialConfig, text, (*guesses, model_guess), missing, contents)


def _not_taken(files: DataFiles, pictured: bool) -> str:
    if (files.image is not None) != pictured:
        return OTHER_KIND
    if pictured and not files.caption:
        return "pictures without captions, which no training can use"
    return f"by its name ({files.word}) of role {files.role}" if files.role else "other documents are taken"


def _documents(files: Sequence[DataFiles]) -> Source | None:
    for role in _PREFERRED:
        if of_role := [one for one in files if one.role == role]:
            word = f"Guessed from the name ({of_role[0].word})." if role else "Guessed: no name states their role."
            return joined(of_role, f"{word} If the model may have seen them, name others.")
    return None
