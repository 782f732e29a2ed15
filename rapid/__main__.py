"""`python -m rapid` is the command `rapid`."""

from rapid.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
