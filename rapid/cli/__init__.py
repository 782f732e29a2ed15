"""The command line: `main` parses, imports the command's module, runs the command and returns the exit code."""

from rapid.cli.main import main

__all__ = ["main"]
