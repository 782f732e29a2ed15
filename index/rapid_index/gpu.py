"""faiss' index on a GPU, where the installed wheel and the GPU fit together; found out by trying in a process apart."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import Any

from .keys import load_faiss, one_line
from .knowledge_base import KnowledgeBase

TRIAL_SECONDS = 120
# Code that a wheel lacks for this GPU ends the whole process, not with an exception; so another process tries first.
TRIAL = """
import sys, numpy, faiss
exec(sys.argv[2])
keys = numpy.random.default_rng(0).standard_normal((400, 8)).astype(numpy.float32)
index = faiss.index_factory(8, "IVF4,Flat")
index.train(keys)
index.add(keys)
gpu = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), int(sys.argv[1]), index)
found = gpu.search(keys, 1, params=faiss.SearchParametersIVF(nprobe=4))[1][:, 0]
sys.exit(0 if (found == numpy.arange(400)).all() else 3)
"""


def move_to_gpu(knowledge_base: KnowledgeBase, device: int, beside: str = "") -> str:
    """Let faiss search an ``ivf`` knowledge base on a GPU from now on, if it can.

    Args:
        knowledge_base: whose index is searched; it stays as it is if this does not work.
        device: number of the GPU.
        beside: Python code of what uses the GPU in this process too, run first where it is tried.

    Returns:
        Why it does not work, in one line; empty if it does.

    """
    problem = gpu_problem(device, beside)
    if not problem:
        try:
            knowledge_base.copy_index_to(lambda index: _copy(index, device))
        except RuntimeError as error:
            # most likely too little memory
            problem = one_line(error)
    return problem


@cache
def gpu_problem(device: int, beside: str = "") -> str:
    """Why the installed faiss cannot search on this GPU, in one line; empty if it can. See `move_to_gpu`."""
    faiss = load_faiss()
    if not hasattr(faiss, "StandardGpuResources"):
        return "the installed faiss is built for CPUs alone (pip install faiss-gpu in its place)"
    try:
        command = [sys.executable, "-c", TRIAL, str(device), beside]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"faiss {faiss.__version__} could not be tried on GPU {device} ({type(error).__name__})"
    if done.returncode == 0:
        return ""
    told = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
    return f"faiss {faiss.__version__} does not work on GPU {device} ({told})"


def _copy(index: Any, device: int) -> Any:
    faiss = load_faiss()
    resources = faiss.StandardGpuResources()
    copied = faiss.index_cpu_to_gpu(resources, device, index)
    copied.rapid_resources = resources  # lives as long as the index
    return copied
