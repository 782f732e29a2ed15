# Sourced by .ci/run after _venv.sh: a Chromium for the tests of the page, which are skipped where none can be had.
_browser() {
    ! command -v chromium chromium-browser google-chrome >/dev/null || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "installing chromium ..." >&2
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium; } >&2 || true
        # on Ubuntu the package is a stub for a snap, which containers have not
        chromium --version >/dev/null 2>&1 && return 0
    fi
    .venv/bin/python -m playwright install chromium >&2 || echo "no Chromium can be had: the page is not tested" >&2
}
_browser
