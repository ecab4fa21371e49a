#!/bin/sh
# Resolves requirements.lock for every machine zero2all promises to run on, without installing anything: x86_64 and
# aarch64, Python 3.11 to 3.13, with and without what testing needs. A pin that torch or another package refuses on one
# of them is found here, and so is a package that has no pin. Needs a package registry; takes about a minute.
set -eu
cd "$(dirname "$0")/.."
uv=$(command -v uv || echo .venv/bin/uv)
[ -x "$uv" ] || .venv/bin/python -m pip install --quiet --disable-pip-version-check uv

found=$(mktemp)
trap 'rm -f "$found"' EXIT
for platform in x86_64 aarch64; do
    for python in 3.11 3.12 3.13; do
        for extra in "" "--extra=dev"; do
            echo "$platform, Python $python${extra:+, dev}"
            # shellcheck disable=SC2086
            "$uv" pip compile --quiet --no-config --no-header --no-annotate --python-platform "$platform-manylinux_2_28" \
                --python-version "$python" --constraint requirements.lock $extra pyproject.toml --output-file "$found"
            if unpinned=$(grep --invert-match --line-regexp --ignore-case --fixed-strings --file requirements.lock "$found"); then
                echo "These versions are not in requirements.lock; add them:" >&2
                echo "$unpinned" >&2
                exit 1
            fi
        done
    done
done
echo "requirements.lock resolves everywhere"
