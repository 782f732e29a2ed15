# Sourced by the scripts: makes .venv with pinned versions once, and sets what CPU training needs. Usage: . _venv.sh EXTRAS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
extras=$1
# one that was interrupted, or made without ensurepip, has a python but no pip
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(command -v python3 || command -v python) || { echo "Python 3.11 or later is needed" >&2; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed" >&2; exit 1; }
    "$python" -m venv --clear .venv
fi
# each extra has a stamp of its own, so several at once are installed once
stale=
for extra in ${extras//,/ }; do
    stamp=.venv/installed-$extra
    if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then stale=1; fi
done
if .venv/bin/python -m pip show --quiet faiss-gpu 2>/dev/null; then
    echo ".venv has rapid[gpu], which rapid[$extras] would undo: move it elsewhere first" >&2
    exit 2
fi
if [ -n "$stale" ]; then
    echo "installing rapid[$extras] into .venv ..." >&2
    # torch by its exact pin first, and from its own index where there is one: others have the build with gigabytes of CUDA.
    # What it needs comes with the rest
    .venv/bin/python -m pip install --quiet --no-deps --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu \
        "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$extras]"
    # without its dependency torchvision: see pyproject.toml
    [[ ,$extras, != *,test,* ]] || .venv/bin/python -m pip install --quiet --no-deps --constraint constraints.txt torch-fidelity
    for extra in ${extras//,/ }; do touch ".venv/installed-$extra"; done
fi
# with the defaults of glibc fresh memory, and small pages on virtual machines, cost more than the arithmetic
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000 GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
