#!/bin/sh
# An OpenSSH server for the tests of the mirror, which start it themselves on a port of their own: does nothing when there
# is one, installs Debian's where that is allowed, and otherwise says so (those tests are then skipped, with the reason).
set -eu
PATH=$PATH:/usr/sbin:/usr/local/sbin:/sbin
command -v sshd >/dev/null 2>&1 && command -v ssh >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing OpenSSH for the tests of the mirror"
    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 # installed, but not started as a service
    { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends openssh-client openssh-server; } \
        >/dev/null && exit 0
fi
echo "No OpenSSH server was found, so the tests of the mirror will be skipped. Debian/Ubuntu: apt-get install openssh-server." >&2
