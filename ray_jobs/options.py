"""The arguments and options that the commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ray_jobs.supervisor import give_as_zero

Keep = Literal["selected", "rest"]
FAIL_HELP = "Exit 4 when anything is selected, and 5 when anything is selected by a selection that a check contradicts."
TRAINED_HELP = "Exit 4 when the collection was trained on, and 5 when something says so that a check contradicts."
ConfigPath = Annotated[str, typer.Argument(metavar="AUDIT.YAML", help="The audit's configuration.")]
TrialPath = Annotated[str, typer.Argument(metavar="TRIAL.YAML", help="The trial's configuration.")]
StatusPath = Annotated[
    str, typer.Argument(metavar="RUN", help="A run directory (local path or fsspec URL), or the folder of a trial.")
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="A run directory: local path or fsspec URL.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", help="Only the first N documents of each role.")]
NoText = Annotated[bool, typer.Option("--no-text", help="Leave all texts out of the report and the selected.")]
Reasons = Annotated[
    list[str] | None,
    typer.Option(
        "--reason", help="Why they are in quarantine; may be repeated. By default model_error, out_of_memory."
    ),
]
FailIfSelected = Annotated[bool, typer.Option("--fail-if-selected", help=FAIL_HELP)]
ExitZeroOn = Annotated[
    str | None,
    typer.Option(
        "--exit-zero-on",
        metavar="CODES",
        callback=give_as_zero,
        is_eager=True,
        expose_value=False,
        help="Exit codes to end with 0 on, such as 3,4, for schedulers that fail a job on any other.",
    ),
]

MatchedFolder = Annotated[
    str | None,
    typer.Option(
        "--matched",
        metavar="FOLDER",
        help="Write the calibration documents whose words resemble the audited to FOLDER, as Parquet to calibrate on.",
    ),
]

OUTPUT_HELP = "Folder of what is written, of its own: local path or fsspec URL."
FirstRun = Annotated[str, typer.Argument(metavar="RUN_A", help="The first finished run: local path or fsspec URL.")]
SecondRun = Annotated[str, typer.Argument(metavar="RUN_B", help="The second.")]
RunPaths = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Finished run directories: local paths or fsspec URLs.")
]
SharedSelection = Annotated[
    str | None,
    typer.Option("--selection", metavar="NAME", help="Which selection; by default the only one that the runs share."),
]
JointAlpha = Annotated[
    float | None,
    typer.Option("--alpha", metavar="A", help="Error rate of the joint selection; by default that of the runs'."),
]
OnShared = Annotated[
    bool, typer.Option("--shared", help="Answer for the documents that all runs audited, where others differ.")
]
ResultPaths = Annotated[
    list[str],
    typer.Argument(
        metavar="RESULTS...",
        help="lm-eval's sample files or folders of them (NAME=PATH names the model), or Parquet: model, item, correct.",
    ),
]
OutPath = Annotated[
    str | None,
    typer.Argument(metavar="[OUT]", help="Folder to write: local path or fsspec URL. By default named after the run."),
]
SelectionName = Annotated[
    str | None, typer.Option("--selection", metavar="NAME", help="Which selection; needed where there are several.")
]
Kept = Annotated[
    Keep | None,
    typer.Option("--keep", help="Which documents; by default the rest, and with direction clean the selected."),
]
AsList = Annotated[bool, typer.Option("--list", help="Ids and rows alone; by default of the selected.")]
AsSamples = Annotated[bool, typer.Option("--samples", help="What lm-evaluation-harness takes for --samples.")]
TaskName = Annotated[
    str | None,
    typer.Option("--task", metavar="NAME", help="The task of --samples; by default the group column names it."),
]
AsHuggingFace = Annotated[bool, typer.Option("--huggingface", help="A Hugging Face dataset folder, as Parquet.")]
WithoutQuarantined = Annotated[
    bool, typer.Option("--without-quarantined", help="Leave documents out of the rest that could not be scored.")
]
UnsupportedToo = Annotated[
    bool, typer.Option("--unsupported-too", help="Export a selection whose promise a check contradicts, marked so.")
]
Watch = Annotated[
    bool,
    typer.Option("--watch", help="Until the run ends; with --json, one object a line whenever it is further."),
]
Every = Annotated[
    float | None, typer.Option("--every", metavar="SECONDS", min=0.1, help="How often --watch looks.", show_default="2")
]
