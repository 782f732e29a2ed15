# Sourced by the scripts: makes .venv with pinned versions once, and sets what CPU training needs. Usage: . _venv.sh EXTRAS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
extras=$1
stamp=.venv/installed-$extras
if [ ! -x .venv/bin/python ]; then
    python=$(command -v python3 || command -v python) || { echo "Python 3.11 or later is needed" >&2; exit 1; }
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed" >&2; exit 1; }
    "$python" -m venv .venv
fi
if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ] || [ constraints.txt -nt "$stamp" ]; then
    echo "installing rapid[$extras] into .venv ..." >&2
    # torch by its exact pin first: a range would fetch the build with gigabytes of CUDA
    .venv/bin/python -m pip install --quiet "$(grep '^torch==' constraints.txt)"
    .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[$extras]"
    # without its dependency torchvision: see pyproject.toml
    [[ ,$extras, != *,test,* ]] || .venv/bin/python -m pip install --quiet --no-deps --constraint constraints.txt torch-fidelity
    touch "$stamp"
fi
# with the defaults of glibc fresh memory, and small pages on virtual machines, cost more than the arithmetic
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_TOP_PAD_=1000000000 GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"
