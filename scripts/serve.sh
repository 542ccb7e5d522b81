#!/bin/bash
# Starts and stops a system below $PENSTOCK_BENCH for benchmarks: data in
# data/, mount at mnt/. With PENSTOCK_SEPARATE=1 meta, chunk server and mount
# are three processes, else `penstock up` is one. PENSTOCK_VOLUME mounts that
# volume instead of the tree. Process ids are in pids/.
set -euo pipefail
: "${BIN:?}" "${PENSTOCK_BENCH:?}"
base=$PENSTOCK_BENCH
mkdir -p "$base"/{data,chunks,mnt,pids,log}

# run NAME COMMAND...: in the background, with its process id noted.
run() {
	local name=$1
	shift
	"$@" >>"$base/log/$name.log" 2>&1 &
	echo $! >"$base/pids/$name"
}

wait_for() {
	for _ in $(seq 600); do
		if "$@"; then return 0; fi
		sleep 0.1
	done
	echo "serve.sh: gave up waiting for: $*" >&2
	for log in "$base"/log/*.log; do tail -n 20 "$log" >&2; done
	exit 1
}

start() {
	if [ "${PENSTOCK_SEPARATE:-}" = 1 ]; then
		run meta "$BIN" meta --dir "$base/data"
		wait_for test -S "$base/data/meta.sock"
		run chunkserver "$BIN" chunkserver --data "$base/chunks" --dir "$base/data"
		wait_for test -S "$base/chunks/chunk.sock"
		run mount "$BIN" mount --dir "$base/data" "${PENSTOCK_VOLUME:-/}" "$base/mnt"
	else
		run up "$BIN" up --dir "$base/data" --mount "$base/mnt"
	fi
	wait_for mountpoint -q "$base/mnt"
}

# stop ends the processes and waits for each: the mount first, then meta, which
# seals what the mount left open, then the chunk server.
stop() {
	for name in mount up meta chunkserver; do
		[ -f "$base/pids/$name" ] || continue
		pid=$(cat "$base/pids/$name")
		kill -TERM "$pid" 2>/dev/null || true
		wait_for bash -c "! kill -0 $pid 2>/dev/null"
		rm -f "$base/pids/$name"
	done
}

case ${1:-} in
start) start ;;
stop) stop ;;
pids) cat "$base"/pids/* ;;
*)
	echo "usage: serve.sh start|stop|pids" >&2
	exit 2
	;;
esac
