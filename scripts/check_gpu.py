"""Does rapid work on this GPU? Each check prints PASS, FAIL or SKIP and a line; all of it goes to a JSON file.

Everything is public or random: images that ship with rapid, a ledger in a temporary folder. Exit code 1 on any FAIL.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import gpu_commands as commands
import gpu_privacy as privacy
import gpu_speed as speed
import torch
from checks import Check, Figures, Found, Outcome, Setup, run
from commands import at_least, check_file, told

import rapid
from rapid.files import write_json
from rapid.heap import prepare_heap
from rapid.runtime import choose_device

PACKAGES = ("torch", "numpy", "diffusers", "faiss-cpu", "faiss-gpu", "cryptography", "opacus")
MINUTES = 10.0
"""No check begins later."""
MARKS = {"PASS": "PASS", "FAIL": "FAIL", "SKIP": "skip"}


def machine(setup: Setup) -> Outcome:
    """What it runs on."""
    versions: Figures = {"rapid": rapid.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found: Figures = {"versions": versions, "system": platform.platform(), "cores": os.cpu_count()}
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        found["processor"] = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
        )
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found["threads"] = torch.get_num_threads()
    found["environment"] = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OMP_", "MKL_", "NCCL_", "TORCH_", "CUDA_", "CUBLAS_", "NVIDIA_TF32"))
    }
    import faiss

    found["faiss"] = {"options": faiss.get_compile_options(), "gpus": getattr(faiss, "get_num_gpus", lambda: 0)()}
    line = f"rapid {rapid.__version__}, torch {torch.__version__}, {found['threads']} threads"
    if setup.name == "cuda":
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "gpus": _gpus()}
        line += f", CUDA {torch.version.cuda}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return line, found


def _gpus() -> list[Figures]:
    """Each GPU, with its driver if nvidia-smi tells."""
    gpus: list[Figures] = []
    for number in range(torch.cuda.device_count()):
        one = torch.cuda.get_device_properties(number)
        gpus.append({
            "name": one.name, "capability": f"{one.major}.{one.minor}", "memory_bytes": one.total_memory,
            "processors": one.multi_processor_count,
        })  # fmt: skip
    with suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        for gpu, line in zip(gpus, told, strict=False):
            gpu["nvidia_smi"] = line.strip()
    return gpus


CHECKS: dict[str, Check] = {
    "machine": machine,
    "clipped sums": privacy.sums("embedding"),
    "clipped sums, cross-attention": privacy.sums("cross-attention"),
    "replayed sums": privacy.replayed("embedding"),
    "replayed sums, cross-attention": privacy.replayed("cross-attention"),
    "recordings that fail": privacy.failed_recording,
    "norm of one example": privacy.norms,
    "neighbours": privacy.neighbours(half=False),
    "neighbours, bfloat16": privacy.neighbours(half=True),
    "not finite": privacy.not_finite,
    "noise": privacy.noise,
    "noise of steps": privacy.noise_of_steps,
    "words of the cipher": privacy.same_words,
    "noise as on the CPU": privacy.same_noise,
    "images": commands.images,
    "build-kb": commands.build,
    "train-private rapid": commands.train("rapid"),
    "train-private late": commands.train("late"),
    "train-private ldm": commands.train("ldm"),
    "train-private, every release": commands.train("late", *commands.RELEASES, name="releases"),
    "auto": commands.automatic,
    **{f"train-private {method}": commands.other(method) for method in commands.OTHERS},
    "generate": commands.command_generate,
    "images, retrieval query": commands.generate("private-rapid", "generation.retrieval=query"),
    "images, retrieval class": commands.generate("private-rapid", "generation.retrieval=class"),
    "images, public bundle": commands.generate("public", "generation.retrieval=class"),
    "images, pndm": commands.generate("private-late", "generation.sampler=pndm", "generation.steps=20"),
    "images, dpm-solver++": commands.generate("private-ldm", "generation.sampler=dpm-solver++", "generation.steps=10"),
    "images, every release": commands.generate("private-releases"),
    "images, dpdm": commands.generate("dpdm"),
    "images, dp-gan": commands.generate("dp-gan"),
    "images, dp-diffusion": commands.generate("dp-diffusion"),
    "predict": commands.predict,
    "evaluate": commands.evaluate,
    "info, plan, ledger": commands.looked_at,
    "audit": commands.audit,
    "serve": commands.serve,
    "step of letters-mnist": speed.step("letters-mnist"),
    "step of imagenet32": speed.step("imagenet32-cifar10"),
    "bundle for times": commands.build_for_speed,
    "sampling steps": speed.engine,
    "search": speed.search,
    "two ranks": commands.ranks,
}


def run_all(names: Sequence[str], setup: Setup, minutes: float) -> list[Found]:
    """Run checks in order, and print each result."""
    deadline, results = time.monotonic() + 60 * minutes, []
    for name in names:
        if time.monotonic() > deadline:
            results.append(Found(name, "SKIP", f"{minutes:g} minutes are over", 0.0))
        else:
            results.append(run(name, CHECKS[name], setup))
        last = results[-1]
        print(f"{MARKS[last.verdict]}  {name:<30}{last.seconds:>7.1f} s  {last.line}", flush=True)
    return results


def main() -> int:
    """Run the checks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="check-gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", metavar="cuda|cpu", help="default: cuda; cpu tries the checks")
    parser.add_argument("--out", type=Path, default=Path("check-gpu.json"), metavar="FILE.json")
    parser.add_argument("--minutes", type=at_least(0.1), default=MINUTES, metavar="M", help=f"default: {MINUTES:g}")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument("--skip", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument("--smallest", action="store_true", help="smallest sizes: tries the checks, measures nothing")
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    options = parser.parse_args()
    if options.list:
        print("\n".join(CHECKS))
        return 0
    for name in (*options.only, *options.skip):
        if name not in CHECKS:
            print(f"check-gpu: {name}: is no check; --list prints all", file=sys.stderr)
            return 2
    with told("check-gpu"):
        check_file(options.out)
        device = choose_device(options.device)
    prepare_heap()
    warnings.simplefilter("ignore")
    names = [name for name in CHECKS if name in (options.only or CHECKS) and name not in options.skip]
    folder = Path(tempfile.mkdtemp(prefix="check-gpu."))
    # nothing is charged to the user's ledger
    os.environ["RAPID_LEDGER"] = str(folder / "ledger.jsonl")
    begin = time.time()
    try:
        results = run_all(names, Setup(device, folder, options.smallest), options.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    count = {verdict: sum(one.verdict == verdict for one in results) for verdict in MARKS}
    report = {
        "form": 1,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begin)),
        "seconds": round(time.time() - begin, 1),
        "device": options.device,
        "smallest": options.smallest,
        "counts": count,
        "checks": [one.content() for one in results],
    }
    write_json(options.out, report)
    print(f"{count['PASS']} passed, {count['FAIL']} failed, {count['SKIP']} skipped; {options.out}")
    return int(count["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
