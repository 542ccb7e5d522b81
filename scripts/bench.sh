#!/bin/bash
# Runs the benchmark on a fresh system beside the native file system below it,
# and cleans up. Arguments go to `penstock bench`; SCRATCH says where (default
# /var/tmp), PENSTOCK_SEPARATE=1 runs meta, chunk server and mount as three
# processes, PENSTOCK_POLICY="--seal-on-close" makes a volume of that policy
# and measures it.
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
target=$PENSTOCK_BENCH/mnt
if [ -n "${PENSTOCK_POLICY:-}" ]; then
	# shellcheck disable=SC2086 # several flags
	"$BIN" volume create bench --dir "$PENSTOCK_BENCH/data" --attach /bench $PENSTOCK_POLICY
	target=$PENSTOCK_BENCH/mnt/bench
fi
"$BIN" bench "$target" --compare "$PENSTOCK_BENCH/native" \
	--restart-cmd "$here/restart.sh" --pids-cmd "$here/serve.sh pids" "$@"
