"""The parts of the engine's benchmark, and who is asked for what."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import decode_loop, engine, latency, link
from bench.options import Options


@pytest.fixture
def asked(monkeypatch):
    """The parts in place of which something else is asked; what they were given."""
    seen = []
    fake = SimpleNamespace(device=nullcontext, stream=nullcontext, Stream=lambda device: device)
    monkeypatch.setattr(engine.torch, "cuda", fake)
    monkeypatch.setattr(engine, "DeviceClock", lambda devices: devices)
    monkeypatch.setattr(engine, "PARTS", {"a": lambda rig: seen.append(rig) or ["row"]})
    return seen


def test_the_parts_are_those_that_are_promised():
    parts = ["link", "two-way", "sustained", "decode", "gemm", "layers", "latency", "submit"]
    assert list(engine.PARTS) == parts


@pytest.mark.parametrize(
    ("options", "mover", "expected"),
    [
        (Options(), None, {}),
        (Options(max_programs=8), None, {"max_programs": 8}),
        (Options(max_programs=8), {"slices": 4}, {"slices": 4, "max_programs": 8}),
    ],
)
def test_what_the_mover_is_told(asked, options, mover, expected):
    assert engine.run(options, mover=mover) == ["row"]
    (rig,) = asked
    assert (rig.mover, rig.options, rig.device) == (expected, options, "cuda:0")


@pytest.mark.parametrize("part", list(engine.PARTS))
def test_a_title_that_is_of_no_part_measures_nothing(rig, part):
    other = replace(rig, options=Options(only="no such title"))
    assert engine.PARTS[part](other) == []


def test_a_part_is_chosen_by_its_name_alone(rig):
    for part in engine.PARTS:
        only = replace(rig, options=Options(only=f"{part} "))
        found = {
            "link": bool(list(link.link_trials(only))),
            "latency": bool(latency.requests(only)),
            **{
                loop: any(
                    only.wants(loop, decode_loop.CASE.name, mode) for mode in decode_loop.MODES
                )
                for loop in decode_loop.PARTS
            },
        }
        assert [name for name, wanted in found.items() if wanted] == [part] * (part in found)
