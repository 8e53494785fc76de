"""The command: gate, files, exit status."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import __main__ as command
from bench import gate, kernels
from bench.results import read, write


@pytest.fixture
def measured(monkeypatch, make_row):
    """Kernels that are measured at once; the options they were given."""
    seen = []

    def run(options):
        seen.append(options)
        failures = ["it burnt"] if options.only == "failed" else []
        return [make_row(bit_exact=options.only != "wrong", failures=failures)]

    monkeypatch.setattr(kernels, "run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return seen


def test_a_closed_gate_prints_no_figures(measured, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gate, "is_open", lambda: False)
    assert command.main(["run", "kernels", "--json", str(tmp_path / "a.json")]) == 1
    assert measured == []
    assert not (tmp_path / "a.json").exists()
    assert "nothing is measured" in capsys.readouterr().err


def test_a_run_leaves_a_file_and_a_page(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "is_open", lambda: True)
    monkeypatch.setenv("BENCH_COMMIT", "f00")
    found, page = tmp_path / "a.json", tmp_path / "a.html"
    arguments = ["--size-mb", "3", "--rounds", "4", "--only", "hnd", "--json", str(found)]
    assert command.main(["run", "kernels", *arguments, "--report", str(page)]) == 0
    (options,) = measured
    assert (options.size_mb, options.rounds, options.only) == (3, 4, "hnd")
    document = read(found)
    assert document.benchmark == "kernels"
    assert document.machine["commit"] == "f00"
    assert page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(("name", "needed"), [("kernels", 1), ("peer", 2)])
def test_without_the_gpus_it_needs_nothing_is_run(name, needed, measured, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: needed - 1)
    assert command.main(["run", name]) == 2
    assert measured == []
    assert f"needs {needed} CUDA devices, found {needed - 1}" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["wrong", "failed"])
def test_wrong_bytes_and_failures_fail_the_run(what, measured):
    assert command.main(["run", "kernels", "--no-gate", "--only", what]) == 1


@pytest.mark.parametrize(("given", "seconds"), [([], 60.0), (["--seconds", "5"], 5.0)])
def test_how_long_a_load_lasts(given, seconds, measured):
    assert command.main(["run", "kernels", "--no-gate", *given]) == 0
    assert measured[0].seconds == seconds


def test_a_load_lasts_a_second_at_least(capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "server", "--seconds", "nan"])
    assert "a second at least" in capsys.readouterr().err


def test_quantiles_need_two_rounds(capsys):
    with pytest.raises(SystemExit):
        command.main(["run", "kernels", "--rounds", "1"])
    assert "two rounds" in capsys.readouterr().err


def test_compare_and_report_read_files(tmp_path, make_row, make_document, capsys):
    one, page = tmp_path / "one.json", tmp_path / "page.html"
    write(make_document(make_row()), one)
    assert command.main(["compare", str(one), str(one)]) == 0
    assert "0.950 of plain" in capsys.readouterr().out
    assert command.main(["report", str(one), str(one), "-o", str(page)]) == 0
    assert page.read_text().count("<section>") == 2


def test_results_of_two_benchmarks_are_not_compared(tmp_path, make_row, make_document, capsys):
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    write(make_document(make_row()), one)
    write(replace(make_document(make_row()), benchmark="peer"), other)
    assert command.main(["compare", str(one), str(other)]) == 2
    assert "two results of one benchmark" in capsys.readouterr().err


def test_a_file_that_is_no_result_is_an_error_in_words(tmp_path, capsys):
    (tmp_path / "no.json").write_text("{}")
    assert command.main(["compare", str(tmp_path / "no.json"), str(tmp_path / "no.json")]) == 2
    assert "no.json" in capsys.readouterr().err


def test_only_picks_by_title():
    from bench.options import Options
    from bench.trials import trials

    wanted = [t for t in trials(256) if Options(only="mla 64").wants(t.title)]
    assert {t.case.name for t in wanted} == {"DeepSeek-V3 MLA 64 [B,N,D]"}
    assert Options().wants("anything")
