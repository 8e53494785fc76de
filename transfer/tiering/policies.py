"""What goes down from the arena to the tiers below it. Pure."""

from __future__ import annotations

STORE_POLICIES = ("all", "found", "none")
"""Every chunk that is stored; those that somebody has found; nothing."""
