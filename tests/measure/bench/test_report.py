"""The report shows a result as tables, whose cells are the result's numbers, and says where files cannot go."""

import pytest

from specbuild.measure.bench.report import check, notes, show, tables
from specbuild.runtime.errors import OutputError


def cells(result, title):
    """A table's rows, by the names of its columns."""
    header, rows = next((header, rows) for name, header, rows in tables(result) if name.startswith(title))
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_an_interval_is_shown_where_there_is_one(result):
    """The baseline's has no width, and of one prompt that has decoded there is none."""
    plain, drafted = cells(result, "output tokens/s")
    assert (plain["tokens/s"], plain["wall"], plain["same text"]) == ("0.7", "1.00×", "2 of 2")
    assert (drafted["tokens/s"], drafted["wall"]) == ("1.3", "2.00× [1.00, 2.50]")
    assert drafted["decode"] == "4.00×"


def test_what_was_not_measured_is_a_dash(result):
    (_, _, math, qa) = cells(result, "by category")
    assert (math["category"], math["TPOT"], math["acceptance length"]) == ("math", "500.00 / 500.00", "4.00")
    assert (qa["category"], qa["prompts"]) == ("qa", "1")
    assert [qa[name] for name in ("decode", "TPOT", "acceptance length", "macro mean")] == ["–"] * 4


def test_rates_past_eight_depths_are_left_out(result):
    found = result["runs"][1]["speculative_decoding"]
    found["acceptance_rate_per_position"] = [0.9] * 8
    found["conditional_acceptance_rate"] = [0.5, *[1.0] * 7, 0.25]
    (row,) = cells(result, "accepted tokens")
    assert row["acceptance rate"] == " ".join(["90%"] * 8)
    assert row["conditional"] == "50% " + "100% " * 7 + "…"
    found["acceptance_rate_per_position"] = None  # a device does not tell how deep its trees were
    assert cells(result, "accepted tokens")[0]["acceptance rate"] == ""


def test_a_table_without_rows_is_left_out(result, capsys):
    assert [len(rows) for _, _, rows in tables(result)] == [2, 2, 2, 1, 4]
    result["runs"] = [result["runs"][0] | {"categories": {}}]
    titles = [title for title, _, _ in tables(result)]
    assert len(titles) == 3
    show(result)
    lines = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in lines if line.strip() in titles] == titles
    (row,) = (line.split() for line in lines if "2 of 2" in line)
    assert row == ["1", "off", "0.7", "1.00×", "1.00×", "2", "of", "2", "1"]


def test_notes_say_how_turns_became_prompts_and_how_many_ended_at_once(result, capsys):
    assert [row["one token"] for row in cells(result, "output tokens/s")] == ["1", "1"]
    result["settings"]["turns"] = "all, as text"
    turns, ended = notes(result)
    assert "all, as text" in turns
    assert "1 of 2 prompts" in ended
    show(result)
    assert ended in capsys.readouterr().out
    result["settings"].clear()
    for run in result["runs"]:
        run["ended_after_one_token"] = 0
    assert notes(result) == []


def test_a_place_that_is_refused_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    check(tmp_path / "file")  # it is written over
    for path, reason in ((tmp_path, "not a file"), (tmp_path / "file" / "x.json", "folder does not exist")):
        with pytest.raises(OutputError, match=f"^{path} .*{reason}"):
            check(path)
