"""What a baseline hands over, and how it says no."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


Found = TypeVar("Found")


class NotApplicable(Exception):
    """This baseline is not here or cannot do this work; the message says why."""


@dataclass(frozen=True)
class Baseline:
    """Attributes:
    run: queues one copy.
    moved: its payload.
    poison: spoils what ``run`` is to write.
    is_exact: whether ``run`` wrote what it should.
    """

    run: Callable[[], object]
    moved: int
    poison: Callable[[], object]
    is_exact: Callable[[], bool]


def ready(
    candidates: Mapping[str, Callable[[], Found]],
) -> tuple[dict[str, Found], dict[str, str]]:
    """What each candidate gives, and why the others gave nothing."""
    found: dict[str, Found] = {}
    absent: dict[str, str] = {}
    for name, prepare in candidates.items():
        result = _result_or_reason(prepare)
        if isinstance(result, _Reason):
            absent[name] = result.text
        else:
            found[name] = result
    return found, absent


@dataclass(frozen=True)
class _Reason:
    text: str


def _result_or_reason(prepare: Callable[[], Found]) -> Found | _Reason:
    try:
        return prepare()
    except NotApplicable as reason:
        return _Reason(str(reason))
    except Exception as error:  # a peer's failure is a line in the result, never ours
        return _Reason(f"failed: {type(error).__name__}: {error}")
