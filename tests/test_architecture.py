"""The shape of the code: layers import downwards, adapters keep to themselves, pure stays pure."""

from __future__ import annotations

import pytest
from import_graph import PACKAGE, find_cycle, import_graph, imports, loaded_by

GRAPH = import_graph()

LAYERS = ("transfer", "adapters")
"""Folders above the bottom layer, lowest first."""

ADAPTERS_MAY_USE = {
    "cli": {"messaging", "server", "admin"},
    "server": {"messaging", "tiers", "admin"},
    "vllm": {"messaging"},
}
"""Which adapters an adapter may import; every other pair stays apart."""

PURE = [
    *("errors", "plane", "ids", "chunk_layout", "copy_config", "copy_tables", "copy_plan"),
    *("axes", "pages", "head_slices", "fingerprint"),
    *("transfer.keys", "transfer.messages", "transfer.arguments", "transfer.addresses"),
    *(
        "transfer.serving.slots",
        "transfer.serving.store",
        "transfer.memory.slot_header",
        "transfer.serving.chunk_table",
        "transfer.serving.counters",
        "transfer.serving.request_log",
        "transfer.tiering.tier",
        "transfer.tiering.policies",
    ),
    *("transfer.serving.eviction", "transfer.moving.pieces", "transfer.tiering.breaker"),
    *("transfer.serving.accounts", "transfer.serving.quotas", "transfer.serving.pins"),
    *("transfer.serving.finding", "transfer.serving.leases", "transfer.serving.tickets"),
    "transfer.serving.ranking",
    *("transfer.serving.expiring", "transfer.serving.request_checks", "transfer.moving.slice_plan"),
    *("transfer.transfer_mode", "transfer.serving.draining"),
    *("adapters.server.config", "adapters.server.kinds"),
    *("transfer.sharing.descriptors", "transfer.cache_forms", "transfer.serving.later"),
    *("adapters.messaging.wire", "adapters.messaging.session", "adapters.messaging.states"),
    *("adapters.vllm.tracker", "adapters.vllm.config", "adapters.vllm.jobs"),
    *("adapters.vllm.running", "adapters.vllm.tenant"),
    *("adapters.tiers.settings", "adapters.tiers.sealing", "adapters.tiers.batches"),
    "adapters.tiers.file_index",
]
IMPURE = {"torch", "triton", "zmq", "threading", "time"}
"""What a pure module loads neither itself nor through another module of ours."""


def level(module: str) -> int:
    return max((i + 1 for i, name in enumerate(LAYERS) if within(module, name)), default=0)


def within(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.{folder}.")


def adapter(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == [PACKAGE, "adapters"] and len(parts) > 2 else None


def violations(module: str, targets: list[tuple[str, int]]) -> list[str]:
    """What the imports of ``module``, as (target, line), break."""
    found = []
    for target, line in targets:
        mine, theirs = adapter(module), adapter(target)
        if target.split(".")[0] in LAYERS:
            found.append(f"{module}:{line} imports {target}: write {PACKAGE}.{target}")
        if target.split(".")[0] == PACKAGE and level(target) > level(module):
            found.append(f"{module}:{line} imports {target}, which is a layer above it")
        if mine and theirs and theirs not in {mine, *ADAPTERS_MAY_USE.get(mine, ())}:
            found.append(f"{module}:{line} imports {target}: adapters stay apart")
        if mine and theirs and mine != theirs and target.rpartition(".")[2].startswith("_"):
            found.append(f"{module}:{line} imports {target}: private to another adapter")
    return found


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_go_down_and_adapters_stay_apart(module):
    assert violations(module, [(i.target, i.line) for i in GRAPH[module]]) == []


def test_no_import_cycles():
    edges = {name: {i.target for i in found if i.runtime} for name, found in GRAPH.items()}
    assert find_cycle(edges) is None


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_stay_pure(name):
    module = f"{PACKAGE}.{name}"
    if module not in GRAPH:
        pytest.fail(f"PURE names {name}, which does not exist")
    loaded = loaded_by(module, GRAPH)
    impure = {m: asker for m, asker in loaded.items() if m.split(".")[0] in IMPURE}
    assert impure == {}


# --- the rules themselves -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "target", "message"),
    [
        (f"{PACKAGE}.plane", "transfer.keys", "write lmcache_kernels.transfer.keys"),
        (f"{PACKAGE}.plane", f"{PACKAGE}.transfer.keys", "a layer above"),
        (f"{PACKAGE}.transfer.keys", f"{PACKAGE}.adapters.cli", "a layer above"),
        (f"{PACKAGE}.adapters.vllm.x", f"{PACKAGE}.adapters.server.main", "stay apart"),
        (f"{PACKAGE}.adapters.messaging.x", f"{PACKAGE}.adapters.vllm", "stay apart"),
        (f"{PACKAGE}.adapters.server.x", f"{PACKAGE}.adapters.messaging._x", "private"),
    ],
)
def test_each_rule_catches_what_it_forbids(module, target, message):
    (found,) = violations(module, [(target, 3)])
    assert message in found


@pytest.mark.parametrize(
    ("module", "target"),
    [
        (f"{PACKAGE}.transfer.keys", f"{PACKAGE}.errors"),
        (f"{PACKAGE}.transfer.keys", PACKAGE),
        (f"{PACKAGE}.adapters.cli.main", f"{PACKAGE}.adapters.server.main"),
        (f"{PACKAGE}.adapters.vllm.x", f"{PACKAGE}.adapters.vllm._y"),
        (f"{PACKAGE}.adapters.vllm.x", "vllm.transfer"),
    ],
)
def test_what_is_meant_is_allowed(module, target):
    assert violations(module, [(target, 3)]) == []


def test_relative_lazy_and_type_only_imports_are_told_apart():
    source = """
from . import messages
from .keys import Span
from ..errors import LayoutError as E
import typing
if typing.TYPE_CHECKING:
    import torch
else:
    import zmq
class Lazy:
    def go(self):
        from .. import plane
try:
    import time
finally:
    pass
"""
    known = {f"{PACKAGE}.{m}" for m in ("errors", "plane", "transfer.messages", "transfer.keys")}
    found = imports(f"{PACKAGE}.transfer.port", source, is_package=False, known=known)
    assert [(i.target.removeprefix(f"{PACKAGE}."), i.runtime, i.at_load) for i in found] == [
        ("transfer.messages", True, True),
        ("transfer.keys", True, True),
        ("errors", True, True),
        ("typing", True, True),
        ("torch", False, False),
        ("zmq", True, True),
        ("plane", True, False),
        ("time", True, True),
    ]
    (own,) = imports(f"{PACKAGE}.transfer", "from .keys import x", is_package=True, known=known)
    assert own.target == f"{PACKAGE}.transfer.keys"


def test_purity_is_transitive_and_counts_parent_packages():
    def at_load(name: str, source: str, known: set[str]) -> list:
        return imports(name, source, is_package="." not in name, known=known)

    known = {"p", "p.a", "p.b"}
    graph = {
        "p": at_load("p", "import torch", known),
        "p.a": at_load("p.a", "from . import b", known),
        "p.b": at_load("p.b", "import zmq.asyncio", known),
    }
    assert loaded_by("p.a", graph).keys() == {*known, "torch", "zmq", "zmq.asyncio"}


def test_a_cycle_is_found_and_named():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
