"""What stands in the place of a configuration, a run directory or a number is answered by what to give or run next."""

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.misplaced import DATA_SUFFIXES
from pipeline.corpus.formats import FORMATS
from pipeline.plan.description import build_config, load_config
from pipeline.store.files import Store
from ray_jobs.cli import main
from tests.helpers.commands import refusal, user_error

AUDIT = """run: runs/first
model: {path: model}
corpus:
  audit: {path: data/audit.jsonl}
  unseen: {path: data/unseen.jsonl}
detectors: [loss]
selections: [{name: members, detectors: [loss], alpha: 0.1}]
"""
PAGE = "<!DOCTYPE html>\n<html lang=en><head><title>Seenset report: m</title></head><body></body></html>"
INIT = "seenset init {} writes {} for the documents in it"
HERE = INIT.format(".", "audit.yaml")
OF_RUN = "seenset status runs/first shows the run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with documents, a configuration, a model and a run directory."""
    rows = [{"id": str(i), "text": f"Some words of document {i}."} for i in range(9)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    for name in ("data/audit.jsonl", "data/unseen.jsonl", "own.jsonl", "named.yaml.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(lines)
    (tmp_path / "one.jsonl").write_text(f"{json.dumps(rows[0])}\n")
    (tmp_path / "one.json").write_text(json.dumps(rows[0]))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "own.csv").write_text("id,text\n1,Some words\n")
    (tmp_path / "own.txt").write_text("A letter.\n\nIt says: nothing.\n")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    shutil.copyfile(tmp_path / "own.parquet", tmp_path / "renamed.yaml")
    (tmp_path / "own.pdf").write_bytes(b"%PDF-1.4\n%\xe2\xe3\n")
    (tmp_path / "own.docx").write_bytes(b"PK\x03\x04\x14\x00")
    (tmp_path / "settings.toml").write_text("[run]\nx = 1\n")
    (tmp_path / "book.ipynb").write_text('{"cells": []}')
    (tmp_path / "own.zip").write_bytes(b"PK\x03\x04\x14\x00")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "lines").write_text(lines)
    (tmp_path / "own.db").write_bytes(b"SQLite format 3\0")
    (tmp_path / "own.pkl").write_bytes(b"\x80\x04}\x94.")
    (tmp_path / "page.html").write_text(PAGE)
    (tmp_path / "page.yaml").write_text(PAGE)
    (tmp_path / "nothing.yaml").write_text("")
    (tmp_path / "wide.yaml").write_bytes(AUDIT.encode("utf-16"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project/mine.yaml").write_text(AUDIT)
    (tmp_path / "zz.yaml").write_text(AUDIT)
    (tmp_path / "trial.yml").write_text("run: t\nmodel: {path: m}\ndocuments: {path: own.jsonl}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for name in ("manifest.json", "shards.json", "report/report.html", "selection/members/selected.parquet"):
        (tmp_path / "runs/first" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "runs/first" / name).write_text("[]")  # of no version
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home/audit.yaml").write_text(AUDIT)
    (tmp_path / "home/.secret").write_text("")
    return tmp_path


NOT_CONFIGS = {
    **dict.fromkeys(("own.jsonl", "one.jsonl", "one.json", "list.json", "own.csv", "own.txt", "own.parquet"), HERE),
    **dict.fromkeys(("named.yaml.jsonl", "renamed.yaml", "page.html", "page.yaml", "nothing.yaml"), HERE),
    **dict.fromkeys(("own.pdf", "own.docx"), f".parquet files; then {HERE}"),
    "none.jsonl": HERE,
    "data": INIT.format("data", "data/audit.yaml"),
    "data/": INIT.format("data", "data/audit.yaml"),
    "project": "did you mean project/mine.yaml?",
    "project/mine.yml": "did you mean project/mine.yaml?",
    "nowhere/audit.yaml": "no folder nowhere either",
    "model": "as model: {path: model}",
    "model/model.safetensors": "as model: {path: model}",
    "model/config.json": "it belongs to a model: name it in a configuration, as model: {path: model}",
    "settings.toml": f"a configuration is YAML: {HERE}",
    "book.ipynb": f"a configuration is YAML: {HERE}",
    "own.zip": f"it is an archive: unpack it; then {HERE}",
    "picture.png": HERE,
    "lines": f"it holds documents: {HERE}",
    "own.db": f"it holds no text: {HERE}",
    "own.pkl": f"it holds no text: {HERE}",
    "zz": "did you mean zz.yaml?",
    "ZZ.YAML": "did you mean zz.yaml?",
    "runs/first/audit.yaml": "its folder is in a run directory: seenset status runs/first shows the run",
    "empty": "it is empty",
    "runs": "it holds run directories: give runs/first",
    "runs/first": "it is a run directory: seenset status runs/first shows it",
    "runs/first/manifest.json": OF_RUN,
    "runs/first/report": OF_RUN,
    "runs/first/report/report.html": OF_RUN,
    "wide.yaml": "save it as UTF-8 text",
    "trial.yml": "describes a trial (documents): seenset trial trial.yml",
    "~/audit.yaml": "did you mean HOME/audit.yaml?",
    "project\\mine.yaml": "did you mean project/mine.yaml?",
    "C:\\data\\audit.yaml": "under WSL it is /mnt/c/data/audit.yaml",
    "file:///data/audit.yaml": "give /data/audit.yaml",
    "https://example.org/audit.yaml": "a configuration is a file of this machine",
    "s3://bucket/audit.yaml": "a configuration is a file of this machine",
}


@pytest.mark.parametrize("given", NOT_CONFIGS)
def test_what_is_no_configuration_is_answered_by_the_next_command(
    place: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("plan", "run", "evaluate"):
        line = refusal(capsys, command, given)
        assert NOT_CONFIGS[given].replace("HOME", str(place / "home")) in line
        for noise in ("unicode string", "document start", "model, reference_model", "Traceback"):
            assert noise not in line


def test_the_folder_of_data_with_a_configuration_leads_to_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "data/audit.yaml").write_text(AUDIT)
    assert "seenset plan data/audit.yaml reads the configuration" in refusal(capsys, "plan", "data/audit.jsonl")
    assert "did you mean data/audit.yaml?" in refusal(capsys, "run", "data")


NOT_RUNS = {
    "data": INIT.format("data", "data/audit.yaml"),
    "own.parquet": HERE,
    "own.jsonl": HERE,
    "project": "setting run names, project/runs/first, which seenset run project/mine.yaml makes",
    "project/mine.yaml": "setting run names, project/runs/first, which seenset run project/mine.yaml makes",
    "home/audit.yaml": "setting run names, home/runs/first, which seenset run home/audit.yaml makes",
    "model": "as model: {path: model}",
    "empty": "it is empty",
    "runs": "it holds run directories: give runs/first",
    "runs/frist": "did you mean runs/first?",
    "first": "did you mean runs/first?",
    "runs/first/report/report.html": "it is in a run directory: give runs/first",
    "runs/first/selection": "it is in a run directory: give runs/first",
    "runs/first/selection/members/selected.parquet": "it is in a run directory: give runs/first",
    "runs\\first": "did you mean PLACE/runs/first?",
    "C:\\runs\\first": "a path of Windows; under WSL it is /mnt/c/runs/first",
}


@pytest.mark.parametrize("given", NOT_RUNS)
def test_what_is_no_run_directory_is_answered_by_the_one_that_is_meant(
    place: Path, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("verdict", "report", "select", "status", "export", "pack", "compare"):
        more = ("other",) if command == "compare" else ()
        assert NOT_RUNS[given].replace("PLACE", str(place)) in refusal(capsys, command, given, *more), command


def test_a_configuration_beside_its_run_names_it_without_a_command(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "audit.yaml").write_text(AUDIT)
    assert refusal(capsys, "verdict", "audit.yaml").endswith("give the folder that its setting run names, runs/first\n")


@pytest.mark.parametrize(
    ("given", "answer"),
    {
        "own.jsonl": f"it is a file: {HERE}",
        "data/audit.jsonl": f"it is a file: {INIT.format('data', 'data/audit.yaml')}",
        "project/mine.yaml": "it is a configuration: seenset plan project/mine.yaml",
        "s3://bucket/x": "name documents elsewhere by their URL in a configuration",
        "runs/first": "it is a run directory: seenset status runs/first shows the run",
        "runs/first/selection": "it is in a run directory: seenset status runs/first shows the run",
        "model": "it is a model: name it in a configuration, as model: {path: model}",
        "date": "no folder date; did you mean data?",
        "run/first": "no folder run either",
        "nothing-like-it": "no folder nothing-like-it",
    }.items(),
)
def test_init_of_what_is_no_folder_of_documents_says_what_it_is(
    place: Path, given: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, "init", given).endswith(f"{answer}\n")
    assert not list(place.glob("runs/**/audit.yaml"))


def test_init_of_a_project_with_runs_and_a_model_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "project/runs").mkdir()
    shutil.copytree(place / "runs/first", place / "project/runs/first")
    shutil.copytree(place / "model", place / "project/model")
    shutil.copyfile(place / "own.jsonl", place / "project/suspects.jsonl")
    (place / "project/mine.yaml").unlink()
    with pytest.raises(SystemExit) as end:
        main(["init", "project"])
    assert not end.value.code
    assert load_config("project/audit.yaml", ["corpus.unseen.path=own.jsonl"]).corpus.audit is not None


def with_line(line: str) -> str:
    """The audit with one setting in place of the one with the same key."""
    key = line.partition(":")[0]
    kept = [one for one in re.split(r"^(?=\w)", AUDIT, flags=re.MULTILINE) if one.partition(":")[0] != key]
    return "".join([*kept, line, "\n"])


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("selections: [{name: a, detectors: [loss], alpha: 5%}]", "got '5%'; did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: .5 %}]", "did you mean 0.005?"),
        ("selections: [{name: a, detectors: [loss], alpha: '0,1'}]", "got '0,1'; did you mean 0.1?"),
        ("selections: [{name: a, detectors: [loss], alpha: 0,1}]", "did you mean 0.1? A comma ends a value"),
        (
            "selections: [{name: a, detectors: [loss], alpha: 0,05}]",
            ": a comma ends a value; write 0.05,",
        ),
        ("selections: [{name: a, detectors: [loss], alpha: 1/20}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: 1 out of 20}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: 5 pc}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: 50‰}]", "did you mean 0.05?"),
        ("error_budget: 100%", "did you mean 1?"),
        ("selections: [{name: a, detectors: [loss], alpha: 5 percent}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: 5 \uff05}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: 1 in 20}]", "did you mean 0.05?"),
        ("selections: [{name: a, detectors: [loss], alpha: ½}]", "did you mean 0.5?"),
        ("selections: [{name: a, detectors: [loss], alpha: 10}]", "got 10; did you mean 0.1 (10%)?"),
        ("selections: [{name: a, detectors: [loss], confidence: 95}]", "did you mean 0.95 (95%)?"),
        ("selections: [{name: a, detectors: [loss], confidence: 95%}]", "did you mean 0.95?"),
        ("error_budget: 1%", "did you mean 0.01?"),
        ("error_budget: 2", "did you mean 0.02 (2%)?"),
        ("max_tokens: 1,024", "did you mean 1024?"),
        ("detectors: [{min_k: {k: 20%}}]", "got '20%'; did you mean 0.2?"),
    ],
)
def test_a_percentage_a_fraction_or_a_decimal_comma_is_answered_by_the_number(
    place: Path, line: str, answer: str
) -> None:
    (place / "audit.yaml").write_text(with_line(line))
    assert answer in user_error(load_config, "audit.yaml")


def test_a_word_is_answered_by_no_number(place: Path) -> None:
    for value in (
        "five",
        "0.1.2",
        "-5%",
        "10%%",
        "1/0",
        "150%",
        "100%",
        "1/1",
        "2000‰",
        "20/1",
        f"1/{'7' * 5000}",
        f"{'7' * 5000}%",
    ):
        (place / "audit.yaml").write_text(with_line(f"selections: [{{name: a, detectors: [loss], alpha: '{value}'}}]"))
        assert "did you mean" not in user_error(load_config, "audit.yaml")


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ('model: {path: "C:\\models\\m"}', "a backslash in double quotes begins an escape: write paths with /"),
        (
            "model: {path: C:\\models\\m}",
            "model.path: no C:\\models\\m; a path of Windows; under WSL it is /mnt/c/models/m",
        ),
        ('run: "C:\\temp\\new"', "a path of Windows; under WSL it is /mnt/c/temp/new"),
        ('corpus: {audit: {path: "data\\audit.jsonl"}}', "did you mean data/audit.jsonl?"),
        ("model: {path: .\\model}", "model.path: no .\\model; did you mean ./model?"),
        ("run: C:\\runs\\a", "run: no C:\\runs\\a; a path of Windows; under WSL it is /mnt/c/runs/a"),
        ("run: D:/runs/a", "run: no D:/runs/a; a path of Windows; under WSL it is /mnt/d/runs/a"),
        ("run: runs\\new", "run: no runs\\new; paths are written with /: runs/new"),
        (
            "corpus: {audit: {path: data\\audit.jsonl}}",
            "corpus.audit.path: no data\\audit.jsonl; did you mean data/audit",
        ),
        ("corpus: {audit: {path: *.jsonl}}", "put a value that begins with * or & in quotes"),
        ("model:\n\tpath: model", "indent with spaces, not with tabs"),
        ("run: runs: first", "put a value that holds a colon and a space in quotes"),
        ("run: @first", "put the value in quotes"),
    ],
)
def test_paths_of_windows_and_misread_yaml_are_answered_by_how_to_write_them(
    place: Path, line: str, answer: str
) -> None:
    (place / "audit.yaml").write_text(with_line(line))
    line = user_error(load_config, "audit.yaml")
    assert answer in line
    assert "unicode string" not in line
    if "is not YAML" in line:
        first = line.removeprefix("config audit.yaml is not YAML: ")
        assert re.match(rf"on line \d+ {re.escape(answer)} \(", first), "the remedy comes first"


def test_a_name_with_a_backslash_that_exists_is_read(place: Path) -> None:
    for name in ("data/a\\b.jsonl", "data/a\\c.jsonl"):
        shutil.copyfile(place / "own.jsonl", place / name)
    Store("runs\\old").write("models/x", b"")
    for path in ("data/a\\b.jsonl", "data/a\\*.jsonl"):
        data = {
            "run": "runs\\old",
            "model": {"path": "model"},
            "corpus": {"audit": {"path": path}},
            "detectors": ["loss"],
        }
        (place / "audit.yaml").write_text(json.dumps(data))
        assert load_config("audit.yaml").run.endswith("runs\\old")


def test_hidden_files_are_not_listed(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, answer in {
        "~/x.jsonl": "no file ~/x.jsonl; the folder holds: audit.yaml",
        "~/.secrets": "did you mean '.secret'?",
    }.items():
        (place / "audit.yaml").write_text(
            with_line(f"corpus: {{audit: {{path: {path}}}, unseen: {{path: own.jsonl}}}}")
        )
        line = refusal(capsys, "plan", "audit.yaml")
        assert answer in line
        assert (".secret" in line) is ("secret" in path)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["run", "x", "--alpha", ".1"], "No such option: --alpha; a setting is changed by --set selections.0.alpha=.1"),
        (["select", "x", "--alpha=.1"], "a setting is changed by --set selections.0.alpha=.1"),
        (["select", "x", "alpha=.1"], "a setting is changed by --set selections.0.alpha=.1"),
        (["plan", "x", "--model", "m"], "a setting is changed by --set model.path=m"),
        (["plan", "x", "--max-tokens", "9"], "a setting is changed by --set max_tokens=9"),
        (["plan", "x", "selections.0.alpha=.1"], "a setting is changed by --set selections.0.alpha=.1"),
        (["plan", "x", "a=1", "b=2"], "a setting is changed by --set A.B=C"),
        (["trial", "x", "--repeats", "9"], "a setting is changed by --set repeats=9"),
        (["run", "x", "--set", "seed", "5"], "--set takes key=value, got 'seed'"),
        (["plan", "--config", "x"], "No such option: --config; its value is given without it: seenset plan x"),
        (["verdict", "--run=x"], "No such option: --run; its value is given without it: seenset verdict x"),
        (["PLAN", "x"], "No such command 'PLAN'. Did you mean 'seenset plan'?"),
        (["help", "run"], "Did you mean 'seenset run --help'?"),
        (["own.jsonl"], "No such command 'own.jsonl'. Did you mean 'seenset init .'?"),
        (["data"], "No such command 'data'. Did you mean 'seenset init data'?"),
        (["scan", "x"], "Did you mean 'seenset run'?"),
        (["--model", "gpt2"], "No such option: --model; a configuration names model and documents: 'seenset init"),
        (["run", "x", "--resume"], "No such option: --resume; the same command goes on where it stopped"),
        (["run", "x", "--dry-run"], "No such option: --dry-run; seenset plan shows what a run would do"),
        (["run", "x", "--output", "y"], "No such option: --output; a setting is changed by --set run=y"),
        (["run", "x", "--gpus", "2"], "a setting is changed by --set resources.gpus_per_actor=2"),
        (["export", "x", "--out", "y"], "No such option: --out; its value is given without it: seenset export RUN y"),
        (["mark", "--source=x"], "No such option: --source; its value is given without it: seenset mark x"),
        (
            ["verdict", "x", "--selection", "a"],
            "No such option: --selection; seenset verdict takes: --blocks, --json, "
            "--fail-if-trained, --help; --selection is an option of seenset compare, export, joint and rank",
        ),
        (["run", "x", "--limits", "5"], "No such option: --limits; did you mean '--limit'? seenset run takes: --set, "),
        (["--verion"], "No such option: --verion; did you mean '--version'? seenset takes: --version, --help"),
        (["zz.yaml"], "No such command 'zz.yaml'. Did you mean 'seenset plan zz.yaml'?"),
        (["version"], "Did you mean 'seenset --version'?"),
        (["plan", "x", "--limit", "1e3"], "did you mean 1000?"),
        (["audit", "x"], "No such command 'audit'. Did you mean 'seenset run'?"),
        (["help"], "Did you mean 'seenset --help'?"),
        (["pln", "x"], "Did you mean 'plan'?"),
        (["frob"], "No such command 'frob'. Known: compare, evaluate, export, init, "),
        (["plan"], "Missing argument 'AUDIT.YAML'. 'seenset init FOLDER' writes one for the documents in a folder."),
        (["verdict"], "Missing argument 'RUN'. It is the folder that the setting run of a configuration names."),
        (["joint", "a", "b", "--alpha", "5%"], "did you mean 0.05?"),
        (["plan", "x", "--limit", "1,000"], "did you mean 1000?"),
        (["trial", "zz.yaml"], "describes an audit (corpus): seenset run zz.yaml"),
        (["verify", "project/mine.yaml"], "is not a bundle: seenset pack RUN writes one"),
    ],
)
def test_a_command_line_of_another_program_is_answered_by_that_of_this_one(
    place: Path, arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer in refusal(capsys, *arguments)


def test_every_suffix_of_documents_is_known_as_one() -> None:
    suffixes = {suffix for form in FORMATS.values() if not form.only_pictures for suffix in form.suffixes}
    assert suffixes <= {*DATA_SUFFIXES}


def test_every_setting_that_a_command_line_is_answered_by_is_one() -> None:
    config = build_config(
        {
            "run": "r",
            "model": {"path": "m"},
            "corpus": {"audit": {"path": "a.jsonl"}, "unseen": {"path": "b.jsonl"}},
            "detectors": ["loss"],
            "selections": [{"name": "a", "detectors": ["loss"]}],
        },
        ["selections.0.alpha=.3", "model.path=n", "max_tokens=9"],
    )
    assert (config.selections[0].alpha, config.max_tokens) == (0.3, 9)
