"""What hardware can do at most, as its makers state it, or as `moonep doctor --json` measured it.

Rates are of one rank (one accelerator) and one direction; makers usually give the sum of both. Rates of products are
for 16-bit numbers without sparsity; makers often give twice that, "with sparsity". 1 GB is 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["ACCELERATORS", "FABRICS", "Hardware", "from_doctor"]


@dataclass(frozen=True)
class Hardware:
    """One rank's share of a cluster. A host is what a fast interconnect joins: for GB200 NVL72, a rack."""

    name: str
    ranks_per_host: int
    memory_bytes: int
    memory_bytes_per_sec: float  # reads and writes together
    inside_bytes_per_sec: float  # between ranks of a host, one direction
    flops_per_sec: float | None  # None: not known
    source: str


ACCELERATORS = {
    each.name: each
    for each in (
        # 80 GB HBM3, 3.35 TB/s; NVLink 900 GB/s both ways; BF16 1,979 TFLOPS with sparsity.
        Hardware("h100", 8, 80 * 10**9, 3.35e12, 450e9, 989.5e12, "NVIDIA H100 Tensor Core GPU data sheet (SXM)"),
        # 141 GB HBM3e, 4.8 TB/s; the rest as H100.
        Hardware("h200", 8, 141 * 10**9, 4.8e12, 450e9, 989.5e12, "NVIDIA H200 Tensor Core GPU data sheet (SXM)"),
        # Of 8 GPUs: 1,440 GB HBM3e, 64 TB/s, NVLink 14.4 TB/s both ways. HGX B200: BF16 36 PFLOPS with sparsity.
        Hardware("b200", 8, 180 * 10**9, 8e12, 900e9, 2.25e15, "NVIDIA DGX B200 data sheet; HGX platform page"),
        # Of 72 GPUs: 13.4 TB HBM3e, 576 TB/s, NVLink 130 TB/s both ways, BF16 360 PFLOPS with sparsity.
        Hardware("gb200-nvl72", 72, 186 * 10**9, 8e12, 900e9, 2.5e15, "NVIDIA GB200 NVL72 data sheet"),
        # 288 GB HBM3E, 8 TB/s; 7 Infinity Fabric links of 153.6 GB/s both ways; BF16 2.5 PFLOPS. A link joins two
        # GPUs, so the sum of all 7 needs even traffic among all 8.
        Hardware("mi355x", 8, 288 * 10**9, 8e12, 537.6e9, 2.5e15, "AMD Instinct MI355X data sheet"),
    )
}

# Between hosts, bytes a second of one rank, one direction: a port for each rank.
FABRICS = {
    "400g": 50e9,  # NVIDIA ConnectX-7 data sheet: 400 Gb/s InfiniBand NDR or Ethernet
    "800g": 100e9,  # NVIDIA ConnectX-8 SuperNIC data sheet: 800 Gb/s
    "100g-ethernet": 12.5e9,  # IEEE 802.3ba (100GBASE): 100 Gb/s
}


def from_doctor(report: Mapping[str, Any], ranks_per_host: int) -> Hardware:
    """The machine that `moonep doctor --json` looked at, shared evenly by its ranks.

    A copy of B bytes reads B and writes B. Rows between ranks of one machine are copied once past the caches. How fast
    it multiplies, the doctor does not say.

    Raises:
        ValueError: not such a report, or one without copies.
    """
    try:
        copies, machine = report["copies"], report["machine"]
        if copies is None:
            raise ValueError("the report has no copies: moonep's extension did not load there")
        copied_bytes_per_sec = float(copies["stream_all_cores_gb_per_s"]) * 1e9 / ranks_per_host
        memory_bytes = int(machine["memory_available_bytes"] or 0) // ranks_per_host
        name = str(machine["cpu"])
    except (KeyError, TypeError):
        raise ValueError("expected what `moonep doctor --json` prints, got something else") from None
    if not (copied_bytes_per_sec > 0 and memory_bytes > 0):
        raise ValueError("expected copies of more than 0 GB/s and memory of more than 0 bytes")
    return Hardware(
        name, ranks_per_host, memory_bytes, 2 * copied_bytes_per_sec, copied_bytes_per_sec, None, "moonep doctor"
    )
