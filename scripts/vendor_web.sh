#!/bin/sh
# Fetches, with npm, what the board's page needs beside our own code. Without npm everything else works, and the board
# says what is missing. Safe to repeat: what is there already is not fetched again.
#   scripts/vendor_web.sh            the chart library (pinned in zero2all/track/chart_library.py)
#   scripts/vendor_web.sh dev        and axe-core, with which the browser tests check the page; it stays in node_modules/
set -eu
cd "$(dirname "$0")/.."
.venv/bin/z2a board --fetch-charts || true
[ "${1:-}" = dev ] || exit 0

version=$(sed -n 's/.*"axe-core": "\(.*\)".*/\1/p' package.json)
grep -q "\"version\": \"$version\"" node_modules/axe-core/package.json 2>/dev/null && exit 0
command -v npm >/dev/null 2>&1 && npm ci --ignore-scripts --silent && exit 0
echo "axe-core was not fetched with npm, so the accessibility checks of the board's page will be skipped." >&2
echo "Install Node (Debian/Ubuntu: apt-get install npm), check its registry, then run scripts/vendor_web.sh dev" >&2
