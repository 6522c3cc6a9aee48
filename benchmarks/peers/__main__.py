"""`moonep bench` with other projects' methods in turn with its own.

python -m benchmarks.peers --json peers.jsonl
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from benchmarks.peers import deepspeed, megatron, torchtitan
from moonep.bench.command import bench
from moonep.bench.config import Peer
from moonep.bench.options import check_files, make_settings
from moonep.bench.verify import VerificationError
from moonep.cli.bench import bench_command
from moonep.errors import MoonEPError
from moonep.testing import RankFailure

PEERS = {module.NAME: module for module in (megatron, torchtitan, deepspeed)}
# Peers are compared forward only, with rows at home; experts and pictures are MoonEP's own.
OWN = ("backward", "experts_compute", "plot_path", "policy", "width")
OPTIONS = [option for option in bench_command.params if option.name not in OWN]


def installed(names: Sequence[str]) -> list[Peer]:
    """Those that can run; says on stderr which cannot."""
    found = []
    for name in names:
        peer = PEERS[name].peer()
        if peer is None:
            click.echo(
                f"{name}: skipped: {PEERS[name].PACKAGE} is not installed (benchmarks/peers/README.md)", err=True
            )
        else:
            found.append(peer)
    if len(found) < len(names):
        click.echo(f"peers skipped: {len(names) - len(found)} of {len(names)}", err=True)
    return found


@click.command(params=OPTIONS)
@click.option("--peer", "names", type=click.Choice(list(PEERS)), multiple=True, help="Only this one; may be repeated.")
def main(names: tuple[str, ...], json_path: str | None, **options: Any) -> None:
    """Times MoonEP and other projects' dispatch and combine in one process group, on the same routing.

    Options and figures are those of moonep bench.
    """
    peers = installed(names or tuple(PEERS))
    if not peers:
        click.echo("nothing to compare", err=True)
        sys.exit(2)
    try:
        check_files(json_path, None)
        settings = make_settings(**options, policy=("home",), backward=False)
        bench(replace(settings, peers=tuple(peers)), json_path, None)
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    except (MoonEPError, RankFailure, VerificationError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
