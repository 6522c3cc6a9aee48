"""How large, how uneven, how fast: what can be known of a layer before any rank is started.

Pure functions of settings (`setting.py`) and of a routing (`routing.py`): rows and replicas of every rank (`loads.py`,
by the planner's own rule), bytes in memory (`memory.py`) and between ranks (`wire.py`), and the least time that these
take on given hardware (`times.py`). `models.py` and `hardware.py` hold published constants. `moonep plan` prints it.

No torch, no ranks, and figures for 896 experts on 896 ranks within seconds.
"""

from __future__ import annotations

__all__: list[str] = []
