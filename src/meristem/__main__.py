"""`python -m meristem`, the form that torchrun needs."""

from meristem.cli import main

if __name__ == "__main__":
    main()
