"""Tiers below the arena: what was stored goes down to them, what is looked up comes up again."""
