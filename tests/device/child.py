"""Functions that run on the pretend device, in a process of their own."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from tests_process import start


class FailedThereError(AssertionError):
    """A function failed on the device; the message is its traceback."""


def on_device(function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(device, *arguments)` returns, in a process of its own in which the pretend device is installed.

    Args:
        function: of a module, so that the process finds it by its name.
        arguments: that can be pickled, as the result.

    Raises:
        FailedThereError: it raised an exception, or the process died.
    """
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = start(_serve, sending, function, arguments)
    sending.close()
    try:
        failure, result = receiving.recv()
    except EOFError:
        failure, result = "the process died", None
    process.join()
    if failure:
        raise FailedThereError(failure)
    return result


def _serve(sending: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from device import pretend

    torch.set_num_threads(1)
    # as in the tests' own processes; but what a flow warns of is not what is tested here
    warnings.simplefilter("ignore")
    try:
        sending.send(("", function(pretend.install(), *arguments)))
    except BaseException:
        sending.send((traceback.format_exc(), None))
    sending.close()
