"""What a service answers with when the reply takes longer than its caller may wait. Pure."""

from __future__ import annotations


class Later:
    """Stands for a reply that will come: the service hands it out again, once, with the reply."""
