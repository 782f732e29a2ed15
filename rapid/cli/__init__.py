"""The command line."""

from rapid.cli.parser import main

__all__ = ["main"]
