"""`moonep bench`: every method on the same routing, checked against the reference, timed side by side.

A run is a list of cases (tokens x routing). For each case, every rank makes the methods (`methods.py`), checks their
results (`verify.py`), measures the machine's copy bandwidth (`floor.py`) and times blocks of steps, the methods in turn
(`timing.py`). Rank 0's figures (`results.py`) become a table, JSON lines and a plot.
"""

from __future__ import annotations

__all__: list[str] = []
