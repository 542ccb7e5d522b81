#!/bin/sh
# Installs the Debian packages of deps.txt (or of the file that DEPS names) that
# are missing, by name, through apt-get. With --check it only tells which are
# missing, and fails if any is.
set -eu
cd "$(dirname "$0")/.."

# present tells whether a command (or, with a slash, a file matching the
# pattern) exists.
present() {
	case $1 in
	*/*) for f in $1; do [ -e "$f" ] && return 0; done; return 1 ;;
	*) command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ] || [ -x "/sbin/$1" ] ;;
	esac
}

missing=
while read -r package shows _; do
	case $package in '' | '#'*) continue ;; esac
	present "$shows" || missing="$missing $package"
done <"${DEPS:-deps.txt}"

[ -z "$missing" ] && exit 0
if [ "${1:-}" = --check ]; then
	echo "missing Debian packages:$missing (install them with: apt-get install$missing)" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "missing Debian packages:$missing; as root run: apt-get install$missing" >&2
	exit 1
fi
echo "installing:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
# shellcheck disable=SC2086 # a list of names
apt-get install -q -y --no-install-recommends $missing
