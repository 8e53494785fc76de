"""What is given to others to run a server with: every flag, variable and path in it is one that there is."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml
from import_graph import ROOT
from serverkit import logged_server

from lmcache_kernels.adapters.admin.access import OPEN
from lmcache_kernels.adapters.server.config import SETTINGS, flag_of
from lmcache_kernels.adapters.server.flags import default_of, parse
from lmcache_kernels.adapters.server.sources import FILE_VARIABLE, Sources, variable_of

DEPLOY = ROOT / "examples/deploy"
GIB = 1 << 30
UNITS = {"Gi": GIB, "gb": GIB, "g": GIB}


def settings(arguments=(), environment=None):
    return parse(list(arguments), environment or {}, "serve").sources.read().config


def nbytes(text):
    number, unit = re.fullmatch(r"([\d.]+)(\w+)", text).groups()
    return float(number) * UNITS[unit]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(s|min|)", text).groups()
    return int(number) * {"s": 1, "min": 60, "": 1}[unit]


def values(service):
    """The settings of a unit, by section and name; each is there once."""
    found: dict[tuple[str, str], str] = {}
    section = ""
    for line in service.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            continue
        name, equals, value = line.partition("=")
        assert equals, line
        assert (section, name) not in found, line
        found[section, name] = value
    return found


def steps(containerfile):
    """Instructions and their arguments."""
    joined = containerfile.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(None, 1)) for line in lines]


# --- systemd --------------------------------------------------------------------------------------

UNIT = (DEPLOY / "lmcache-kernels.service").read_text()


def test_the_unit_runs_a_server_with_settings_that_there_are(tmp_path):
    unit = values(UNIT)
    program, command, *arguments = shlex.split(unit["Service", "ExecStart"])
    assert (program.rsplit("/", 1)[1], command) == ("lmcache-kernels", "serve")
    line = parse(arguments, {}, "serve")
    assert line.sources.file.name == "server.toml"
    config = Sources({}, {}, DEPLOY / line.sources.file.name).read().config
    assert seconds(unit["Service", "TimeoutStopSec"]) > config.drain_timeout_seconds
    assert unit["Service", "Type"] == "notify"
    assert unit["Service", "ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["Service", "Restart"] == "on-failure"
    assert unit["Service", "NoNewPrivileges"] == "yes"
    assert unit["Service", "User"] != "root"
    assert unit["Service", "LimitMEMLOCK"] == "infinity"


def test_every_setting_that_the_example_file_leaves_out_is_one_that_there_is(tmp_path):
    """Lines that are only to be uncommented."""
    text = (DEPLOY / "server.toml").read_text()
    uncommented = re.sub(r"^# ([a-z0-9-]+ = )", r"\1", text, flags=re.MULTILINE)
    path = tmp_path / "server.toml"
    path.write_text(uncommented)
    effective = Sources({}, {}, path).read()
    assert len(effective.origins) == len(re.findall(r"^(# )?[a-z0-9-]+ = ", text, re.MULTILINE)) > 4


def test_systemd_takes_the_unit(tmp_path):
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("needs systemd-analyze")
    path = tmp_path / "lmcache-kernels.service"
    path.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", UNIT))
    done = subprocess.run([analyze, "verify", path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# --- containers -----------------------------------------------------------------------------------

IMAGE = steps((DEPLOY / "Containerfile").read_text())


def test_the_image_serves_as_somebody_who_is_not_root():
    last = dict(IMAGE)
    assert json.loads(last["ENTRYPOINT"]) == ["lmcache-kernels", "serve"]
    assert "CMD" not in last
    assert last["USER"].split(":")[0] not in ("0", "root")
    assert last["STOPSIGNAL"] == "SIGTERM"
    environment = dict(word.split("=", 1) for word in last["ENV"].split())
    assert settings((), environment).log_format == "json"


def test_the_image_installs_extras_that_there_are():
    project = (ROOT / "pyproject.toml").read_text()
    (extras,) = re.findall(r"'/src\[([a-z,]+)\]'", str(IMAGE))
    assert all(re.search(f"^{extra} = ", project, re.MULTILINE) for extra in extras.split(","))


def test_the_health_check_of_the_image_tells_a_server_that_serves_from_none():
    last = dict(IMAGE)
    *_, command = last["HEALTHCHECK"].partition("CMD ")
    program, *arguments = json.loads(command)
    assert program == "python"
    default = f":{SETTINGS['http_port'].default}/"
    assert default in arguments[-1]
    with logged_server("--http-port", "0") as server:
        port = server.wait_log(r"administration at http://127\.0\.0\.1:(\d+)")[1]
        check = [sys.executable, *arguments[:-1], arguments[-1].replace(default, f":{port}/")]
        assert subprocess.run(check, timeout=60, capture_output=True).returncode == 0
        server.process.kill()
        server.wait()
        assert subprocess.run(check, timeout=60, capture_output=True).returncode == 1


def test_compose_starts_a_server_with_settings_that_there_are():
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    cache, engine = services["cache"], services["vllm"]
    config = settings((), cache["environment"])
    assert config.l1_bytes < nbytes(cache["shm_size"])
    assert config.drain_timeout_seconds < seconds(cache["stop_grace_period"])
    assert (ROOT / cache["build"]["dockerfile"]).is_file()
    assert (DEPLOY / cache["build"]["context"]).resolve() == ROOT
    assert engine["ipc"] == engine["network_mode"] == "service:cache"
    check_engine(engine["command"], config)


def test_kubernetes_starts_a_server_with_settings_that_there_are(tmp_path):
    config_map, pod = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    spec = pod["spec"]
    (cache,), (engine,) = spec["initContainers"], spec["containers"]
    (name,) = config_map["data"]
    assert cache["args"] == ["--config", f"/etc/cache/{name}"]
    path = tmp_path / name
    path.write_text(config_map["data"][name])
    config = Sources({}, {}, path).read().config
    assert config.l1_bytes < nbytes(cache["resources"]["limits"]["memory"])
    assert config.drain_timeout_seconds < spec["terminationGracePeriodSeconds"]
    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes.keys() == {mount["name"] for mount in cache["volumeMounts"]}
    assert volumes["settings"]["configMap"]["name"] == config_map["metadata"]["name"]
    assert config.l1_bytes < nbytes(volumes["shm"]["emptyDir"]["sizeLimit"])
    assert volumes["admin"]["secret"]["defaultMode"] & 0o007 == 0
    for container in (cache, engine):
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = cache[probe]["httpGet"]
        assert asked["path"] in OPEN, "no probe has a token"
        assert asked["port"] == cache["ports"][0]["name"]
    assert cache["ports"][0]["containerPort"] == config.http_port
    check_engine(engine["args"], config)


def check_engine(arguments, config):
    """vLLM finds the server where it listens if nobody says where that is."""
    (said,) = [one for one in arguments if one.startswith("--kv-transfer-config=")]
    transfer = json.loads(said.partition("=")[2])
    assert transfer["kv_connector"] == "LMCacheKernelsConnector"
    assert "kv_connector_extra_config" not in transfer
    assert (config.host, config.port, config.chunk_size) == ("127.0.0.1", 5555, 256)


# --- the page about it ----------------------------------------------------------------------------

PAGE = (ROOT / "docs/server.md").read_text()


def row(name):
    """Of the table of settings."""
    setting = SETTINGS[name]
    cells = [f"`{flag_of(name)}`", default_of(setting), str(setting.kind)]
    cells += ["yes" if setting.live else "", setting.help]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def test_the_page_has_a_row_for_every_setting():
    missing = [row(name) for name in SETTINGS if row(name) not in PAGE.splitlines()]
    assert not missing, "docs/server.md needs these rows:\n" + "\n".join(missing)
    rows = [line for line in PAGE.splitlines() if line.startswith("| `--")]
    assert rows == [row(name) for name in SETTINGS], "in this order, and no others"


def test_the_page_names_only_flags_variables_and_files_that_there_are():
    flags = {flag_of(name) for name in SETTINGS}
    flags |= {"--config", "--print-config", "--stop-on-eof", "--help", "--shm-size"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", PAGE)) <= flags
    variables = {variable_of(name) for name in SETTINGS} | {FILE_VARIABLE}
    named = set(re.findall(r"LMCACHE_KERNELS_SERVE_[A-Z0-9_]+", PAGE))
    assert named <= variables | {"LMCACHE_KERNELS_SERVE_"}
    for path in re.findall(r"\]\(([^)#:]+)[^)]*\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_the_files_on_the_page_are_read(suffix, tmp_path):
    blocks = re.findall(rf"^```{suffix}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert blocks
    for number, block in enumerate(blocks):
        path = tmp_path / f"{number}.{suffix}"
        path.write_text(block)
        assert Sources({}, {}, path).read().origins
