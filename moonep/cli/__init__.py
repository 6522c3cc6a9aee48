"""The command `moonep`. Commands import what they need when they run, so that --help answers at once."""

from __future__ import annotations

import click

from moonep._version import __version__
from moonep.cli.bench import bench_command
from moonep.cli.doctor import doctor
from moonep.cli.plan import plan_command
from moonep.cli.trace import trace_command

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(__version__, prog_name="moonep")
def main() -> None:
    """MoonEP: moves the tokens of Mixture-of-Experts layers to experts and back."""


main.add_command(bench_command)
main.add_command(doctor)
main.add_command(plan_command)
main.add_command(trace_command)
