"""What is written about metrics elsewhere, in docs, dashboard and alerts, names only what there is."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from adminkit import SHARD, AdminRig, digests
from tierkit import MemoryTier, TieredCache

from lmcache_kernels.adapters.admin.metrics import DURATIONS, DURATIONS_HELP, METRICS, PREFIX
from lmcache_kernels.transfer.messages import Lookup

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"
GRAFANA = ROOT / "docs" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboard.json").read_text())
NAMES = re.compile(r"\b(?:lmcache_kernels|process)_\w+")


@pytest.fixture(scope="module")
def scraped():
    """The labels of every metric of a server that has a tier, a worker, a quota and served something."""
    with TieredCache(MemoryTier()) as cache:
        cache.store(0, 2)
        cache.lookup(0, 4)
        cache.service.set_quota("team-a", 1 << 20)
        with AdminRig(service=cache.service) as rig:
            rig.ask(Lookup(request="r", shards=[SHARD], digests=digests(0, 1)))
            samples = rig.scrape()
    return {name: {label for label, _ in labels} for name, *labels in samples}


def test_each_metric_of_the_table_is_scraped_and_there_are_no_others(scraped):
    rows = re.findall(
        r"^\| `(lmcache_kernels_\w+)` \| (.*?) \| (.*?) \|$", OPERATIONS.read_text(), re.M
    )
    written = {name: (labels, meaning) for name, labels, meaning in rows}
    told = [(one.name, one.labels, one.help) for one in METRICS]
    told.append((DURATIONS, ("operation",), DURATIONS_HELP))
    assert written == {
        PREFIX + name: (", ".join(f"`{label}`" for label in labels), meaning)
        for name, labels, meaning in told
    }
    samples = {
        re.sub("_(bucket|sum|count)$", "", name) for name in scraped if name.startswith(PREFIX)
    }
    assert samples == set(written)


def panels():
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions():
    return [target["expr"] for panel in panels() for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_only_for_what_is_scraped(expression, scraped):
    names = NAMES.findall(expression)
    assert names
    assert set(names) <= set(scraped)
    labels = {label for name in names for label in scraped[name]} | {"instance"}
    by = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
    used = {label.strip() for some in by for label in some.split(",")}
    used |= set(re.findall(r"(\w+)(?:=|!=|=~|!~)\"", expression))
    assert used <= labels


def test_the_dashboard_can_be_imported():
    """Ids are unique, panels lie side by side in Grafana's 24 columns, legends name labels that are kept."""
    assert DASHBOARD["title"]
    assert DASHBOARD["uid"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        cells = {
            (x, y)
            for x in range(grid["x"], grid["x"] + grid["w"])
            for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "instance"}


@pytest.fixture
def promtool():
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool: Debian has it in the package prometheus")

    def run(*arguments: str, cwd: Path = GRAFANA) -> str:
        done = subprocess.run(
            [found, *arguments], capture_output=True, text=True, cwd=cwd, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_alerts_ask_only_for_what_is_scraped(scraped):
    rules = (GRAFANA / "alerts.yaml").read_text()
    names = set(NAMES.findall(rules))
    assert names
    assert names <= set(scraped)


def test_alerts_and_configuration_are_what_prometheus_reads(promtool):
    assert "rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yaml")


def test_alerts_fire_when_they_should_and_else_do_not(promtool):
    promtool("test", "rules", "alerts_test.yaml")


def test_each_expression_of_the_dashboard_is_promql(promtool, tmp_path):
    rules = [
        {
            "record": f"panel:{number}",
            "expr": expression.replace("$__rate_interval", "1m").replace("$instance", ".*"),
        }
        for number, expression in enumerate(expressions())
    ]
    # JSON is YAML.
    file = tmp_path / "panels.yaml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(file))


def test_pictures_are_small_and_linked():
    text = OPERATIONS.read_text()
    pictures = sorted((ROOT / "docs" / "images").glob("*"))
    assert pictures
    for picture in pictures:
        assert picture.stat().st_size < 300 << 10
        assert f"images/{picture.name}" in text


@pytest.fixture
def render(monkeypatch):
    """The script, as a module."""
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("render", GRAFANA / "render.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "render", module)
    spec.loader.exec_module(module)
    return module


def test_the_renderer_asks_what_the_panels_ask_and_draws_them(render, monkeypatch, tmp_path):
    """With a Prometheus that gives every query the same two lines."""
    queries = []

    def answer(url, timeout):
        query = parse_qs(urlsplit(url).query)
        queries.append(query["query"][0])
        values = [
            [float(query["start"][0]) + 5 * n, value] for n, value in enumerate(("1", "2", "NaN"))
        ]
        lines = [{"metric": {"tier": tier}, "values": values} for tier in ("l1", "files")]
        return io.BytesIO(json.dumps({"data": {"result": lines}}).encode())

    monkeypatch.setattr(render.urllib.request, "urlopen", answer)
    picture = tmp_path / "dashboard.png"
    monkeypatch.setattr(sys, "argv", ["render", "-o", str(picture)])
    render.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(queries) == len(expressions())
    assert not any("$" in query for query in queries)


@pytest.mark.parametrize(
    ("value", "unit", "written"),
    [
        *((0.5, "percentunit", "50.0%"), (1536, "bytes", "1.5 KiB"), (2.5e9, "Bps", "2.5 GB/s")),
        *((0.0015, "s", "1.5 ms"), (15e-6, "s", "15 us"), (12.0, "reqps", "12 req/s")),
        *((float("nan"), "short", "no data"), (0, "short", "0")),
    ],
)
def test_values_are_written_as_people_read_them(render, value, unit, written):
    assert render.written(value, unit) == written
