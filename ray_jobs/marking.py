"""The command for authors who will publish: seenset mark. It asks no audited model."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer

from ray_jobs import terminal
from ray_jobs.options import AsJson

INPUT_HELP = "File or folder with the documents: Parquet, JSONL (.gz, .zst), CSV, .txt."
OUT_HELP = "Folder to write, of its own: public/, private/ and commitment.json. Nothing is overwritten."
SEED_HELP = "Secret number below 2**256 that all draws follow from; by default drawn and written to private/seed.json."
WITH_HELP = "YAML of a paraphraser, as `paraphraser:` of an audit: a model writes all versions, the published one too."
DATE_HELP = "Date that commitment.json states; by default none."


def mark(
    source: Annotated[str, typer.Argument(metavar="INPUT", help=INPUT_HELP)],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help=OUT_HELP)],
    versions: Annotated[int, typer.Option("--versions", metavar="K", help="Versions of a document, 2 to 1,000.")] = 20,
    text: Annotated[str, typer.Option("--text", metavar="COLUMN", help="Column that holds the text.")] = "text",
    id_: Annotated[
        str | None, typer.Option("--id", metavar="COLUMN", help="Column that holds the id; by default file#row.")
    ] = None,
    language: Annotated[str, typer.Option("--language", metavar="CODE", help="Language of the documents.")] = "en",
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help=SEED_HELP)] = None,
    with_: Annotated[str | None, typer.Option("--with", metavar="CONFIG.YAML", help=WITH_HELP)] = None,
    date: Annotated[
        datetime | None, typer.Option("--date", metavar="YYYY-MM-DD", formats=["%Y-%m-%d"], help=DATE_HELP)
    ] = None,
    json_: AsJson = False,
) -> None:
    """Write documents in versions and publish one of each, drawn at random, so that training on them can be shown."""
    from pipeline.mark.mark import MarkRequest, check_request, mark_documents
    from pipeline.mark.versions import new_seed

    seed = new_seed() if seed is None else seed
    created = None if date is None else date.date().isoformat()
    request, draw = MarkRequest(source, out, versions, text, id_, seed, language, None, created), None
    check_request(request)
    if with_ is not None:
        from pipeline.mark.paraphrases import paraphraser_of, paraphrasing

        model = paraphraser_of(with_)
        request, draw = replace(request, model=model.shown), paraphrasing(model, versions, seed)
    marked = mark_documents(request, draw)
    if json_:
        terminal.print_json(marked.plain())
    else:
        terminal.print_marked(marked)
