"""doctor --calibrate: what it measures is what the planner finds again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lmcache_kernels.adapters.cli.calibrate import run_calibration
from lmcache_kernels.errors import ConfigError
from lmcache_kernels.transfer.moving import calibration
from lmcache_kernels.transfer.moving.calibration import FORMAT_VERSION, Calibration, keep, kept
from lmcache_kernels.transfer.moving.planner import Sample

MACHINE = {"gpu": "a GPU", "driver": "1.2", "link": "32.0 GT/s x16"}
SAMPLES = [Sample("staged", True, 4096, 16, 1e-4), Sample("direct", False, 4096, 16, 2e-4)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "machine_of", lambda device: MACHINE)
    return tmp_path


def test_without_a_gpu_there_is_nothing_to_calibrate(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="no GPU"):
        run_calibration()


def test_every_gpu_is_measured_and_kept(folder, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"a GPU {index}")
    monkeypatch.setattr(
        calibration, "calibrate", lambda device: Calibration(FORMAT_VERSION, MACHINE, SAMPLES)
    )
    assert run_calibration() == 0
    assert kept("cuda:0") == SAMPLES
    assert "cuda:1 (a GPU 1)" in capsys.readouterr().out


def test_what_torch_says_of_a_gpu_names_a_file(tmp_path, monkeypatch):
    gpu = SimpleNamespace(name="a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(calibration, "pci_address", lambda index: "")
    assert kept("cuda:0", tmp_path) is None
    keep(Calibration(FORMAT_VERSION, calibration.machine_of("cuda:0"), SAMPLES), tmp_path)
    assert kept("cuda:0", tmp_path) == SAMPLES


def test_a_folder_that_cannot_be_written_is_one_line(folder, monkeypatch):
    blocked = folder / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(
        calibration, "calibrate", lambda device: Calibration(FORMAT_VERSION, MACHINE, SAMPLES)
    )
    with pytest.raises(ConfigError, match="cannot be kept"):
        run_calibration()


def test_what_was_kept_is_found_and_other_machines_do_not_find_it(folder, monkeypatch):
    assert kept("cuda:0", folder) is None
    keep(Calibration(FORMAT_VERSION, MACHINE, SAMPLES), folder)
    assert kept("cuda:0", folder) == SAMPLES
    monkeypatch.setattr(calibration, "machine_of", lambda device: MACHINE | {"driver": "1.3"})
    assert kept("cuda:0", folder) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[:-20],
        lambda text: text.replace("0.0001", "-1"),
        lambda text: text.replace("0.0001", "1e9"),
        lambda text: text.replace('"staged"', '"scenic"'),
        lambda text: text.replace('"staged"', "7"),
        lambda text: "null",
        lambda text: "",
    ],
)
def test_a_file_that_is_no_good_is_ignored_with_a_warning(folder, caplog, spoil):
    path = keep(Calibration(FORMAT_VERSION, MACHINE, SAMPLES), folder)
    path.write_text(spoil(path.read_text()))
    assert kept("cuda:0", folder) is None
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize("change", [{"version": 99}, {"machine": {}}])
def test_a_file_of_another_time_or_place_is_ignored(folder, change):
    path = keep(Calibration(FORMAT_VERSION, MACHINE, SAMPLES), folder)
    other = Calibration(
        change.get("version", FORMAT_VERSION), change.get("machine", MACHINE), SAMPLES
    )
    keep(other, folder).replace(path)
    assert kept("cuda:0", folder) is None
