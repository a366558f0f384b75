"""`hybrid schedule`: the drawing, its numbers, the other forms, files, and refusals."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hybrid.cli.app import app
from hybrid.cli.schedule import schedule
from hybrid.contracts.schedule import make_schedule
from hybrid.contracts.schedule_text import from_csv, from_text

APP = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
APP.command()(schedule)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipeline.md"


def run(*arguments: str, columns: int = 100) -> Any:
    return CliRunner().invoke(APP, list(arguments), env={"COLUMNS": str(columns)})


def test_the_drawing() -> None:
    result = run("--stages", "3", "--micro-batches", "3")
    assert result.exit_code == 0
    assert result.stdout == (
        "1f1b: 3 stages, 3 micro-batches\n"
        "rank 0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---\n"
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .\n"
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .\n"
        "F forward, B backward, . idle; F1: micro-batch 1\n"
        "\n"
        "rank  bubble  kept at most  closed form\n"
        "0      40.0%             3            3\n"
        "1      40.0%             2            2\n"
        "2      40.0%             1            1\n"
        "kept: micro-batches whose activations a rank holds, closed form min(p-r, m) on rank r\n"
        "step 15 s, bubble 40.0%, closed form (p-1)/(m+p-1) = 40.0%\n"
    )


def test_chunks_are_named_where_a_rank_has_several() -> None:
    result = run(
        "--stages", "2", "--micro-batches", "2", "--schedule", "interleaved", "--virtual-stages", "2", "--backward", "1"
    )
    assert "rank 0  F0.0 F0.1 F2.0 F2.1 .    B2.0 .    B2.1 B0.0 B0.1\n" in result.stdout
    assert "F0.1: chunk 0, micro-batch 1" in result.stdout
    assert "(p-1)/(v·m+p-1) = 20.0%" in result.stdout
    assert "step 5 s" in result.stdout, "a stage's second is shared by its chunks"


def test_a_narrow_terminal_gets_the_compact_form() -> None:
    """No line is folded or cut: one letter per column, for several seconds where columns are too few."""
    result = run("--stages", "3", "--micro-batches", "3", columns=40)
    assert "rank 0  FFF....BB.BB.BB\nrank 1  .FF..BBFBB.BB..\nrank 2  ..FBBFBBFBB....\n" in result.stdout
    assert "one column is 1 s" in result.stdout
    result = run("--stages", "3", "--micro-batches", "30", columns=40)
    drawn = re.findall(r"^rank \d  ([FB.]+)$", result.stdout, flags=re.MULTILINE)
    assert [len(line) for line in drawn] == [32, 32, 32]
    assert "one column is 3 s" in result.stdout


def test_odd_times_are_drawn_all_the_same() -> None:
    for costs in (("0.37", "0.91"), ("1e-7", "3e-7"), ("1e9", "1"), ("0", "0"), ("0", "1")):
        result = run("--stages", "3", "--micro-batches", "3", "--forward", costs[0], "--backward", costs[1])
        assert result.exit_code == 0, result.output
        assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_json_has_every_number() -> None:
    result = run(
        "--stages", "2", "--micro-batches", "2", "--forward", "1,2", "--backward", "2,4", "--transfer", "0.5", "--json"
    )
    told = json.loads(result.stdout)
    assert told["total_seconds"] == 16
    assert told["bubble_fraction"] == pytest.approx(14 / 32)
    assert told["critical_path"] == ["F0.0", "F1.0", "B1.0", "F1.1", "B1.1", "B0.1"]
    assert told["closed_form"]["bubble_fraction"] == pytest.approx(1 / 3)
    assert told["closed_form"]["max_in_flight"] == [2, 1]
    assert [rank["max_in_flight"] for rank in told["ranks"]] == [2, 1]
    assert told["ranks"][1]["actions"][0] == {"action": "F1.0", "start_seconds": 1.5, "end_seconds": 3.5}


@pytest.mark.parametrize(("flag", "suffix"), [("--csv", ".csv"), ("--text", ".txt")])
def test_a_printed_schedule_comes_back_from_a_file(flag: str, suffix: str, tmp_path: Path) -> None:
    sizes = ("--stages", "2", "--micro-batches", "4", "--schedule", "interleaved", "--virtual-stages", "2")
    printed = run(*sizes, flag).stdout
    expected = make_schedule("interleaved", num_stages=2, num_micro_batches=4, virtual_stages=2)
    assert (from_csv(printed, name="interleaved") if flag == "--csv" else from_text(printed)) == expected
    file = tmp_path / f"mine{suffix}"
    file.write_text("\ufeff" + printed, encoding="utf-8")  # with the mark that a spreadsheet puts in front
    assert (
        json.loads(run("--file", str(file), "--json").stdout)["ranks"]
        == json.loads(run(*sizes, "--json").stdout)["ranks"]
    )


def test_all_problems_of_a_file_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("F0.0 B0.0 F0.1 B0.1\nF1.0 F1.1 B1.0 B1.1\n", encoding="utf-8")
    result = run("--file", str(file))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "1 problem in the schedule" in result.stderr
    assert "rank 0 waits before B0.0 for the gradient of B1.0 on rank 1; rank 1 waits before F1.1" in result.stderr
    file.write_text("B0.0 F0.0\nF1.0\n", encoding="utf-8")
    told = json.loads(run("--file", str(file), "--json").stdout)["problems"]
    assert len(told) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--stages is needed", "--micro-batches is needed"]),
        (["--stages", "4", "--micro-batches", "6", "--schedule", "interleaved", "--virtual-stages", "2"], ["4 or 8"]),
        (["--stages", "0", "--micro-batches", "6"], ["num_stages = 0"]),
        (["--stages", "9999", "--micro-batches", "9999"], ["199,960,002 actions", "at most 1,000,000"]),
        (["--stages", "2", "--micro-batches", "2", "--schedule", "zigzag"], ["'zigzag'", "gpipe, 1f1b, interleaved"]),
        (["--stages", "2", "--micro-batches", "2", "--forward", "1,x"], ["--forward is '1,x'"]),
        (["--stages", "2", "--micro-batches", "2", "--backward", "1,2,3"], ["--backward has 3 values for 2 chunks"]),
        (["--stages", "2", "--micro-batches", "2", "--transfer", "-1"], ["transfer_seconds = -1.0"]),
        (["--file", "none.csv"], ["none.csv", "No such file"]),
        (["--stages", "2", "--micro-batches", "2", "--json", "--csv"], ["--json and --csv"]),
        (["--stages", "2", "--micro-batches", "2", "--csv", "--forward", "1"], ["on which --forward has no effect"]),
        (
            ["--stages", "2", "--micro-batches", "2", "--text", "--backward", "1", "--transfer", "0"],
            ["--backward and --transfer have no effect"],
        ),
    ],
)
def test_bad_input_is_refused(arguments: list[str], words: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output


def test_options_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(run("--stages", "2", "--micro-batches", "2", "--csv").stdout, encoding="utf-8")
    result = run("--file", str(file), "--stages", "4", "--micro-batches", "2", "--schedule", "gpipe")
    assert result.exit_code == 2
    assert "2 problems" in result.stderr
    assert "--stages is 4 but" in result.stderr
    assert "mine.csv names none, but its actions are not those of gpipe for 2 stages" in result.stderr
    named = tmp_path / "mine.txt"
    named.write_text(run("--stages", "2", "--micro-batches", "2", "--text").stdout, encoding="utf-8")
    assert f"--schedule is gpipe but {named} says 1f1b" in run("--file", str(named), "--schedule", "gpipe").stderr


def test_a_file_without_a_name_is_known_by_its_actions(tmp_path: Path) -> None:
    """CSV has no place for the name, and the closed form went lost with it; an edited order is none of ours."""
    file = tmp_path / "mine.csv"
    sizes = ("--stages", "2", "--micro-batches", "4", "--schedule", "zbv")
    file.write_text(run(*sizes, "--csv").stdout, encoding="utf-8")
    assert run("--file", str(file)).stdout == run("--file", str(file), "--schedule", "zbv").stdout == run(*sizes).stdout
    # One micro-batch goes the same way under both names: the one that is asked for is the one.
    file.write_text(run("--stages", "2", "--micro-batches", "1", "--csv").stdout, encoding="utf-8")
    for name in ("gpipe", "1f1b"):
        assert run("--file", str(file), "--schedule", name).stdout.startswith(f"{name}: 2 stages")
    text = "F0.0 F0.1 B0.1 B0.0\n"
    file.with_suffix(".txt").write_text(text, encoding="utf-8")
    assert run("--file", str(file.with_suffix(".txt"))).stdout.startswith("mine: 1 stages")


def test_help_teaches() -> None:
    text = CliRunner().invoke(app, ["schedule", "--help"], env={"COLUMNS": "120"}).output
    for words in ("hybrid schedule --stages 4 --micro-batches 8", "chunk c lives on rank", "free of deadlock"):
        assert words in text


def test_the_page_shows_what_the_command_prints() -> None:
    blocks = re.findall(
        r"```text\n\$ hybrid schedule ([^\n]+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert blocks
    for arguments, shown in blocks:
        assert run(*shlex.split(arguments)).stdout == shown
