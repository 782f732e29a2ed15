"""Growth of a knowledge base: disk, memory, time of build and query, recall by size (see scripts/bench-knowledge-base).

Keys are unit vectors near a surface of 16 dimensions, in 1,000 clusters, as a trained encoder's might be; queries are
drawn like keys, and are not among them. Values are small, so that the keys are most of what is measured. Times are
those of processors, of all threads together, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from commands import at_least
from numpy.typing import NDArray
from rapid_index import KnowledgeBase, KnowledgeBaseWriter, load_faiss

from rapid.files import write_json

FEATURES, SURFACE, CLUSTERS, SPREAD = 64, 16, 1000, 0.5
VALUE_SHAPE = (1, 4, 4)
BATCH = 10_000
QUERY_SEED = 1 << 40
"""Beyond the number of any record."""
RESULTS, CHART = "results.json", "growth.svg"
NEIGHBOURS = 10


def keys_of(start: int, count: int) -> NDArray[np.float32]:
    """Keys of records start..start+count-1, float32 (count, FEATURES), of unit length; the same for the same start."""
    fixed = np.random.default_rng(0)
    centres = fixed.standard_normal((CLUSTERS, SURFACE), dtype=np.float32)
    outward = fixed.standard_normal((SURFACE, FEATURES), dtype=np.float32)
    rng = np.random.default_rng([1, start])
    places = centres[rng.integers(0, CLUSTERS, count)]
    places += SPREAD * rng.standard_normal((count, SURFACE), dtype=np.float32)
    keys = places @ outward + 0.1 * rng.standard_normal((count, FEATURES), dtype=np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


def batches(size: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]]:
    """Records of a knowledge base of `size`."""
    for start in range(0, size, BATCH):
        count = min(BATCH, size - start)
        values = np.random.default_rng([2, start]).random((count, *VALUE_SHAPE), dtype=np.float32)
        yield keys_of(start, count), values, np.arange(start, start + count) % 10


def build(folder: Path, size: int) -> dict[str, float]:
    """Build a knowledge base; the time to make up records does not count."""
    seconds = 0.0
    writer = KnowledgeBaseWriter(
        folder,
        key_dim=FEATURES,
        value_shape=VALUE_SHAPE,
        k=600,
        v=200,
        timesteps=1000,
        networks={},
        index_type="ivf",
    )
    with writer:
        for keys, values, labels in batches(size):
            begin = time.process_time()
            writer.append(keys, values, labels)
            seconds += time.process_time() - begin
        begin = time.process_time()
    seconds += time.process_time() - begin
    disk = sum(path.stat().st_size for path in folder.iterdir())
    return {"build_seconds": seconds, "build_bytes": peak(), "disk_bytes": disk}


def query(folder: Path, count: int) -> dict[str, float]:
    """Open a knowledge base, search it for queries one by one, and compare with exact search."""
    load_faiss()
    begin = time.process_time()
    knowledge_base = KnowledgeBase.open(folder, verify=False)
    opened = time.process_time() - begin
    queries = keys_of(QUERY_SEED, count)
    knowledge_base.search(queries[:16], NEIGHBOURS)
    seconds, found = [], []
    for row in range(count):
        begin = time.process_time()
        found.append(knowledge_base.search(queries[row : row + 1], NEIGHBOURS).indices[0])
        seconds.append(time.process_time() - begin)
    begin = time.process_time()
    exact = knowledge_base.search(queries, NEIGHBOURS, exact=True).indices
    everything = (time.process_time() - begin) / count
    hits = [np.isin(one, other).mean() for one, other in zip(exact, np.stack(found), strict=True)]
    nearest = [one[0] in other for one, other in zip(exact, found, strict=True)]
    return {
        "open_seconds": opened,
        "query_seconds": float(np.median(seconds)),
        "exact_seconds": everything,
        "recall": float(np.mean(hits)),
        "recall_of_nearest": float(np.mean(nearest)),
        "query_bytes": peak(),
        "queries": count,
    }


def peak() -> int:
    """Largest resident memory of this process so far, bytes; mapped files count as far as they were read."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def apart(arguments: Sequence[object]) -> dict[str, float]:
    """What another process of this script measures."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench-knowledge-base: {' '.join(command)} failed")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def chart(results: Mapping[str, Mapping[str, float]]) -> str:
    """All figures by size, as SVG."""
    import matplotlib as mpl
    from charts import STYLE
    from matplotlib.figure import Figure

    sizes = sorted(map(int, results))

    def column(name: str, scale: float = 1.0) -> list[float]:
        return [scale * results[str(size)][name] for size in sizes]

    panels = (
        ("disk, GB", {"keys, values, labels": column("disk_bytes", 1e-9)}),
        (
            "peak memory, GB",
            {"build": column("build_bytes", 1e-9), "queries, with mapped pages": column("query_bytes", 1e-9)},
        ),
        ("processor time of the build, s", {"build": column("build_seconds")}),
        (
            "processor time of a query, ms",
            {"ivf": column("query_seconds", 1e3), "every key": column("exact_seconds", 1e3)},
        ),
        (
            f"recall against every key, {NEIGHBOURS} neighbours",
            {"all": column("recall"), "the nearest": column("recall_of_nearest")},
        ),
    )
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(13, 3.2), layout="constrained")
        for axes, (title, lines) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            for name, values in lines.items():
                axes.plot(sizes, values, "o-", label=name)
            axes.set(xscale="log", xlabel="records")
            axes.set_title(title, loc="left", fontsize="small")
            if title.startswith("recall"):
                axes.set_ylim(0, 1.02)
            else:
                axes.set_yscale("log")
            axes.grid(alpha=0.4)
            axes.legend(fontsize="x-small")
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """The figures as a table, Markdown."""
    lines = [
        "| records | disk | peak memory of the build | build | peak memory of queries | open | a query | every key | "
        f"recall@{NEIGHBOURS} | recall@1 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sorted(map(int, results)):
        one = results[str(size)]
        lines.append(
            f"| {size:,} | {one['disk_bytes'] / 1e9:.3f} GB | {one['build_bytes'] / 1e9:.2f} GB "
            f"| {one['build_seconds']:.1f} s | {one['query_bytes'] / 1e9:.2f} GB | {one['open_seconds']:.2f} s "
            f"| {1e3 * one['query_seconds']:.2f} ms | {1e3 * one['exact_seconds']:.2f} ms | {one['recall']:.3f} "
            f"| {one['recall_of_nearest']:.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every size that has not been measured, and write figures, table and chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sizes", type=at_least(NEIGHBOURS), nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000], metavar="N"
    )
    parser.add_argument("--queries", type=at_least(1), default=200, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/knowledge-base"), metavar="DIR")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where to build; default: the system's own")
    parser.add_argument("--one", nargs=2, metavar=("build|query", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        step, folder = options.one[0], Path(options.one[1])
        found: dict[str, Any] = build(folder, options.sizes[0]) if step == "build" else query(folder, options.queries)
        print(json.dumps(found))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / RESULTS
    results: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.is_file() else {}
    for size in options.sizes:
        if str(size) in results:
            continue
        scratch = Path(tempfile.mkdtemp(prefix="rapid-knowledge-base-", dir=options.scratch))
        try:
            common = ["--sizes", size, "--queries", options.queries, "--one"]
            figures = apart([*common, "build", scratch / "kb"]) | apart([*common, "query", scratch / "kb"])
        finally:
            shutil.rmtree(scratch)
        results[str(size)] = figures | {"threads": float(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))}
        write_json(path, results)
        print(f"{size:,} records: {json.dumps(figures)}", flush=True)
    (options.out / CHART).write_text(chart(results))
    (options.out / "table.md").write_text(table(results))
    print(table(results))


if __name__ == "__main__":
    main()
