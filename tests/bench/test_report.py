"""The page is well formed, needs nothing else, and shows every figure."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from bench.baselines import BASELINES, TO_HOST
from bench.charts import COLOURS, Group, bar_chart
from bench.decode_loop import COPY
from bench.kernels import UNCHANGED
from bench.plain_link import CEILING
from bench.report import render
from bench.results import OURS
from bench.saturation import ALONE
from bench.timing import Spread


@pytest.fixture
def page(make_row, make_document):
    host = make_row(
        "TP8", direction="16 ids", ids="list", bytes=0, run_bytes=0, ceiling="", parts={"a": 1e-6}
    )
    odd = make_row(
        'A & B <"x">',
        bit_exact=False,
        absent={"lmcache": "a < b"},
        moved={"plain": 1 << 20},
    )
    return render([make_document(make_row(), odd), make_document(host)])


def tree(page):
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def test_the_page_is_well_formed(page):
    assert tree(page).tag == "html"


def test_the_page_refers_to_nothing_outside(page):
    assert not re.search(r"https?:|//|@import|url\(|<script|<link|<img|src=|href=", page)


def test_every_contender_of_every_row_is_in_a_table(page):
    assert len(list(tree(page).iter("tbody"))) == 2
    assert [len(body.findall("tr")) for body in tree(page).iter("tbody")] == [4, 2]
    assert "1980.0" in page
    assert "0.950" in page


def test_wrong_bytes_and_absent_peers_are_told(page):
    assert ">NO<" in page
    assert "lmcache: a &lt; b (1 of 2 rows)" in page


def test_charts_have_a_name_and_tables_have_heads(page):
    charts = list(tree(page).iter("svg"))
    assert len(charts) == 2
    for chart in charts:
        assert chart.get("role") == "img"
        assert chart.get("aria-label") == chart.findtext("title")
    for heads in tree(page).iter("thead"):
        assert all(head.get("scope") == "col" for head in heads.iter("th"))


def test_the_machine_is_named(page):
    assert "NVIDIA &lt;H200&gt;" in page


def test_both_colour_schemes_colour_the_same_series(page):
    light, dark = page.split("@media (prefers-color-scheme: dark)")
    assert set(re.findall(r"--b\d", light)) == set(re.findall(r"--b\d(?=:)", dark))


def test_bars_are_to_scale_and_cut_at_the_limit():
    groups = [Group("g", (("a", 0.5), ("b", 2.0)))]
    chart = ElementTree.fromstring(bar_chart("t", groups, ["a", "b"], limit=1.0, unit=""))
    half, beyond = (float(bar.get("width", "")) for bar in chart.iter("rect"))
    assert beyond == pytest.approx(2 * half)
    assert "2 →" in ElementTree.tostring(chart, encoding="unicode")


def test_a_row_of_zero_length_still_draws():
    chart = bar_chart("t", [Group("g", (("a", 0.0),))], ["a"], limit=1.0, unit="")
    assert ElementTree.fromstring(chart).tag == "svg"


def test_a_page_of_no_rows_is_a_page(make_document):
    assert tree(render([make_document()])).tag == "html"


def test_spreads_with_tiny_times(make_row, make_document):
    row = make_row(seconds={"ours": Spread(1e-9, 2e-9, 3e-9), "plain": Spread(1e-9, 1e-9, 1e-9)})
    assert tree(render([make_document(row)])).tag == "html"


def test_every_contender_has_a_colour_of_its_own():
    assert len({*BASELINES, OURS, UNCHANGED}) <= COLOURS
    assert len({*TO_HOST, OURS, CEILING, ALONE, COPY}) <= COLOURS


@pytest.fixture
def beside(make_row):
    seconds = {
        name: Spread(ms / 1e3, ms / 1e3, ms / 1e3)
        for name, ms in (("ours", 2.04), ("alone", 2.0), ("theirs", 1.99))
    }
    rates = {"ours": {"gather": 50.04e9, "scatter": 49.0e9}, "theirs": {"gather": 30e9}}
    return make_row(
        "Llama", part="decode", direction="both", bytes=0, ceiling="alone", seconds=seconds,
        beside=rates,
    )  # fmt: skip


def test_a_loop_beside_copies_tells_what_they_cost_it_and_how_much_they_copied(
    beside, make_document
):
    page = render([make_document(beside)])
    (chart,) = tree(page).iter("svg")
    assert chart.findtext("title").startswith("decode both: percent that a step takes longer")
    assert [bar.findtext("title") for bar in chart.iter("g")] == ["ours: 2 %", "theirs: -0.5 %"]
    (_, loops) = tree(page).iter("tbody")
    assert [[cell.text for cell in line] for line in loops] == [
        ["decode Llama both", "ours", "2040.0", "1.020", "gather 50.0, scatter 49.0"],
        ["decode Llama both", "theirs", "1990.0", "0.995", "gather 30.0"],
    ]


def test_parts_of_a_benchmark_are_plotted_apart(make_row, make_document, beside):
    rows = [make_row(part="link"), make_row(part="latency"), make_row(), beside]
    titles = [chart.findtext("title") for chart in tree(render([make_document(*rows)])).iter("svg")]
    assert [title.split(":")[0] for title in titles] == [
        "link gather", "latency gather", "gather", "decode both"
    ]  # fmt: skip
    labels = [e.text for e in tree(render([make_document(rows[0])])).iter("text")]
    assert "Llama [2,B,N,H,D], 256 MiB" in labels


def test_tails_and_parts_of_the_time_are_shown(make_row, make_document):
    row = make_row(
        seconds={"ours": Spread(1e-6, 2e-6, 3e-6, 4e-6)}, ceiling="", parts={"a_b": 1e-6}
    )
    page = render([make_document(row)])
    assert "<td>4.0</td>" in page
    assert "<td>a b 1.0</td>" in page
