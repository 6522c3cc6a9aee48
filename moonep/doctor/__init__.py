"""What this machine offers to MoonEP, and what stands in its way: measured and tried, not guessed.

Every step is taken on a machine where it may fail: torch or the extension may be missing, ranks may not start. What
fails is reported, and the rest goes on. So nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from moonep.doctor.copies import measure_copies
from moonep.doctor.look import look_at_gpus, look_at_machine, look_at_software
from moonep.doctor.problems import find_problems
from moonep.doctor.report import Report, Section
from moonep.doctor.trials import try_transports

__all__ = ["examine"]


def examine(*, ranks: bool = True, seen: Callable[[Section], None] = lambda section: None) -> Report:
    """Looks at everything.

    Args:
        ranks: start two processes and try the transports between them.
        seen: called with every section as soon as it is known.
    """
    this_machine = look_at_machine()
    seen(this_machine)
    software = look_at_software()
    seen(software)
    gpus = look_at_gpus(software)
    seen(gpus)
    works = software.torch_error is None and software.extension_error is None
    copies = None
    if works:
        with contextlib.suppress(MemoryError, RuntimeError):  # no room for the copies, or for threads
            copies = measure_copies(this_machine)
    if copies is not None:
        seen(copies)
    transports = try_transports(software, gpus, ranks)
    seen(transports)
    return Report(
        machine=this_machine,
        software=software,
        gpus=gpus,
        copies=copies,
        transports=transports,
        problems=find_problems(this_machine, software, gpus, transports),
        usable=any(trial.usable for trial in transports.trials().values()),
    )
