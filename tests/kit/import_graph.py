"""Who imports whom, read from the sources with ``ast``; nothing is imported to find out."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lmcache_kernels"
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Import:
    """One import statement's target. ``runtime``: not for type checkers alone; ``at_load``: runs
    when the module is loaded, so neither for type checkers nor inside a function."""

    target: str
    runtime: bool
    at_load: bool
    line: int


def sources(root: Path = ROOT) -> dict[str, Path]:
    """Every first-party module by its dotted name; symbolic links among the folders are followed."""
    found: dict[str, Path] = {}
    folders = [root / PACKAGE]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if path.is_dir() and (path / "__init__.py").exists():
                folders.append(path)
            elif path.suffix == ".py":
                parts = path.relative_to(root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, source: str, *, is_package: bool, known: set[str]) -> list[Import]:
    """The imports of module ``name``; ``from a import b`` targets ``a.b`` if that is in ``known``."""
    found: list[Import] = []

    def visit(node: ast.AST, runtime: bool, at_load: bool) -> None:
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base] if base else parts)
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = sorted({full if full in known else base for full in names})
        else:
            targets = []
        found.extend(Import(target, runtime, at_load, node.lineno) for target in targets)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                visit(child, False, False)
            for child in node.orelse:
                visit(child, runtime, at_load)
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            at_load = False
        for child in ast.iter_child_nodes(node):
            visit(child, runtime, at_load)

    visit(ast.parse(source), True, True)
    return found


def import_graph() -> dict[str, list[Import]]:
    modules = sources()
    return {
        name: imports(
            name, path.read_text(), is_package=path.name == "__init__.py", known=set(modules)
        )
        for name, path in modules.items()
    }


def loaded_by(name: str, graph: dict[str, list[Import]]) -> dict[str, str]:
    """Every module that loading ``name`` loads, as far as first-party code decides, with the module
    that asked for it. Loading ``a.b.c`` loads the packages ``a`` and ``a.b`` too."""
    asked_by: dict[str, str] = {}
    todo = [(name, name)]
    while todo:
        module, asker = todo.pop()
        if module in asked_by:
            continue
        asked_by[module] = asker
        if "." in module:
            todo.append((module.rpartition(".")[0], module))
        todo += [(i.target, module) for i in graph.get(module, []) if i.at_load]
    return asked_by


def find_cycle(edges: dict[str, set[str]]) -> list[str] | None:
    """Some cycle of a directed graph, as its nodes in order; None if there is none."""
    state: dict[str, bool] = {}  # False: on the path, True: done
    path: list[str] = []

    def visit(node: str) -> list[str] | None:
        state[node] = False
        path.append(node)
        for following in sorted(edges.get(node, ())):
            if state.get(following) is False:
                return [*path[path.index(following) :], following]
            if following not in state and (cycle := visit(following)):
                return cycle
        path.pop()
        state[node] = True
        return None

    for node in sorted(edges):
        if node not in state and (cycle := visit(node)):
            return cycle
    return None
