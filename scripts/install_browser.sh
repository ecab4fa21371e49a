#!/bin/sh
# A Chromium for the browser tests of the board: does nothing when there is one, installs Debian's where that is allowed,
# and otherwise says so (those tests are then skipped, with the same reason).
set -eu
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the browser tests"
    { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends chromium; } >/dev/null && exit 0
fi
echo "No Chromium was found, so the browser tests will be skipped. Debian/Ubuntu: apt-get install chromium." >&2
