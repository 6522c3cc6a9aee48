"""`python -m moonep`, and so `torchrun -m moonep bench`."""

from moonep.cli import main

main(prog_name="moonep")
