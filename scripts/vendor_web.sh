#!/bin/sh
# Copies the chart library of the board's page (uPlot, pinned in package.json) to zero2all/track/web/vendor/, where the
# server and the wheel take it from. Only this needs Node; without it everything else works, and the board says what is
# missing. Safe to repeat: when the right version is there, nothing is done.
#   scripts/vendor_web.sh            the chart library
#   scripts/vendor_web.sh dev        and axe-core, with which the browser tests check the page; it stays in node_modules/
set -eu
cd "$(dirname "$0")/.."
vendor=zero2all/track/web/vendor
checker=node_modules/axe-core/package.json
pinned() { sed -n "s/.*\"$1\": \"\(.*\)\".*/\1/p" package.json; }
version=$(pinned uplot)

has_charts() { [ "$(cat "$vendor/VERSION" 2>/dev/null)" = "$version" ]; }
has_checker() { [ "${1:-}" != dev ] || grep -q "\"version\": \"$(pinned axe-core)\"" "$checker" 2>/dev/null; }

has_charts && has_checker "${1:-}" && exit 0
missing="the board's page has no chart library yet"
has_charts && missing="the checks of the board's page for accessibility will be skipped"
if ! command -v npm >/dev/null 2>&1; then
    echo "npm was not found, so $missing; all else works." >&2
    echo "Install Node (Debian/Ubuntu: apt-get install npm), then run scripts/vendor_web.sh ${1:-}" >&2
    exit 0
fi
omit=--omit=dev
[ "${1:-}" = dev ] && omit=
# shellcheck disable=SC2086
if ! npm ci --ignore-scripts --silent $omit; then
    echo "npm could not fetch what package.json names, so $missing; all else works." >&2
    echo "With a connection to an npm registry, run scripts/vendor_web.sh ${1:-} again." >&2
    exit 0
fi
has_charts && exit 0
mkdir -p "$vendor"
cp node_modules/uplot/dist/uPlot.iife.min.js node_modules/uplot/LICENSE "$vendor/"
echo "$version" >"$vendor/VERSION"
echo "uPlot $version copied to $vendor"
