#!/bin/sh
# Copies the chart library of the board's page (uPlot, pinned in package.json) to zero2all/track/web/vendor/, where the
# server and the wheel take it from. Only this needs Node; without it everything else works, and the board says what is
# missing. Safe to repeat: when the right version is there, nothing is done.
set -eu
cd "$(dirname "$0")/.."
vendor=zero2all/track/web/vendor
version=$(sed -n 's/.*"uplot": "\(.*\)".*/\1/p' package.json)

[ "$(cat "$vendor/VERSION" 2>/dev/null)" = "$version" ] && exit 0
if ! command -v npm >/dev/null 2>&1; then
    echo "npm was not found, so the board's page has no chart library yet; all else works." >&2
    echo "Install Node (Debian/Ubuntu: apt-get install npm), then run scripts/vendor_web.sh." >&2
    exit 0
fi
if ! npm ci --ignore-scripts --silent; then
    echo "npm could not fetch uPlot $version, so the board's page has no chart library yet; all else works." >&2
    echo "With a connection to an npm registry, run scripts/vendor_web.sh again." >&2
    exit 0
fi
mkdir -p "$vendor"
cp node_modules/uplot/dist/uPlot.iife.min.js node_modules/uplot/LICENSE "$vendor/"
echo "$version" >"$vendor/VERSION"
echo "uPlot $version copied to $vendor"
