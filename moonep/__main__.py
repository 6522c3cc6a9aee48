"""`python -m moonep`, and so `torchrun -m moonep bench`."""

from moonep.cli import main

if __name__ == "__main__":
    main(prog_name="moonep")
