"""Benchmarks: ``python -m bench run NAME``. Ratios within one run, against the link and peers."""
