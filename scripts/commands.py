"""Commands of rapid as processes of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_rapid(
    arguments: Sequence[object], launcher: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> None:
    """Run `rapid ARGUMENTS`, and end this process with its exit code if that is not 0: it has said what is wrong.

    Args:
        arguments: words after `rapid`.
        launcher: words before `-m rapid`; empty for one process.
        environment: of the process; None for that of this one.
    """
    command = [sys.executable, *launcher, "-m", "rapid", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            # Ctrl-C reached the command, too; subprocess.run would kill it while it saves its checkpoint
            continue
    if code:
        sys.exit(code if code > 0 else 128 - code)
