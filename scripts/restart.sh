#!/bin/bash
# Restarts the system that scripts/bench.sh started: the benchmark's restart
# command, run before each cold row for both directories. For the native side
# nothing serves the directory, so there is nothing to do. With the argument
# immutable or mutable the measured volume becomes so first.
set -euo pipefail
: "${BENCH_DIR:?}" "${PENSTOCK_BENCH:?}"
case $BENCH_DIR in "$PENSTOCK_BENCH"/mnt*) ;; *) exit 0 ;; esac
case ${1:-} in
immutable) "$BIN" volume set bench --dir "$PENSTOCK_BENCH/data" --immutable ;;
mutable) "$BIN" volume set bench --dir "$PENSTOCK_BENCH/data" --immutable=false ;;
esac
"$(dirname "$0")/serve.sh" stop
"$(dirname "$0")/serve.sh" start
