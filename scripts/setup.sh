#!/bin/sh
# Makes the virtual environment .venv and installs zero2all into it, with the versions of requirements.lock.
#   scripts/setup.sh            what running needs
#   scripts/setup.sh dev        and what testing needs
set -eu
cd "$(dirname "$0")/.."

find_python() {
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.13; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "zero2all needs Python 3.11 or newer, and none was found on the PATH." >&2
    echo "Install one (Debian/Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python3.11" >&2
    exit 1
}

if [ ! -x .venv/bin/python ]; then
    python=$(find_python)
    if ! "$python" -m venv .venv; then
        rm -rf .venv
        echo "$python cannot make a virtual environment. Debian/Ubuntu: apt-get install python3-venv, then again." >&2
        exit 1
    fi
fi

extras=""
[ "${1:-}" = "dev" ] && extras="[dev]"
echo "Installing zero2all$extras into .venv (a few minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements.lock --editable ".$extras" || {
    echo "The installation failed. Look at pip's message above; 'rm -rf .venv' starts over." >&2
    exit 1
}

./scripts/compile_kernels.sh &
compiling=$!
./scripts/vendor_web.sh "${1:-}"
if [ "${1:-}" = "dev" ]; then
    ./scripts/install_browser.sh
    ./scripts/install_sshd.sh
    .venv/bin/pytest --collect-only -q > /dev/null || true # compiles the tests; `make test` says what is wrong with them
fi
wait "$compiling"
