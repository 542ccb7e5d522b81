#!/bin/bash
# Runs the benchmark on a fresh system beside the native file system below it,
# and cleans up. Arguments go to `penstock bench`. By environment:
#
#	SCRATCH             where (default /var/tmp)
#	PENSTOCK_SEPARATE   1: meta, chunk server and mount are three processes
#	PENSTOCK_POLICY     flags of `penstock volume create`, such as
#	                    --seal-on-close: a volume of that policy is measured
#	PENSTOCK_IMMUTABLE  1: a volume is measured that is immutable, and its mount
#	                    no-open, while rows run; choose rows that only read
set -euo pipefail
: "${BIN:?set BIN to the penstock binary, or run make bench}"
export BIN
here=$(cd "$(dirname "$0")" && pwd)
PENSTOCK_BENCH=$(mktemp -d "${SCRATCH:-/var/tmp}/penstock-bench-XXXXXX")
export PENSTOCK_BENCH

clean_up() {
	"$here/serve.sh" stop || true
	if mountpoint -q "$PENSTOCK_BENCH/mnt"; then umount -l "$PENSTOCK_BENCH/mnt"; fi
	rm -rf --one-file-system "$PENSTOCK_BENCH"
}
trap clean_up EXIT

mkdir -p "$PENSTOCK_BENCH/native"
"$here/serve.sh" start
hooks=()
if [ -n "${PENSTOCK_POLICY:-}${PENSTOCK_IMMUTABLE:-}" ]; then
	# shellcheck disable=SC2086 # several flags
	"$BIN" volume create bench --dir "$PENSTOCK_BENCH/data" ${PENSTOCK_POLICY:-}
	"$here/serve.sh" stop
	export PENSTOCK_SEPARATE=1 PENSTOCK_VOLUME=bench:/
	"$here/serve.sh" start
fi
if [ "${PENSTOCK_IMMUTABLE:-}" = 1 ]; then
	hooks=(--prepared-cmd "$here/restart.sh immutable" --finish-cmd "$here/restart.sh mutable")
fi
"$BIN" bench "$PENSTOCK_BENCH/mnt" --compare "$PENSTOCK_BENCH/native" \
	--restart-cmd "$here/restart.sh" --pids-cmd "$here/serve.sh pids" "${hooks[@]}" "$@"
