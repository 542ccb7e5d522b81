#!/bin/bash
# Runs every fuzz test of the module for the given time, one after the other.
set -euo pipefail
cd "$(dirname "$0")/.."
time=${1:-10s}
go=${GO:-go}
for pkg in $("$go" list -f '{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}}{{end}}' ./...); do
	for name in $("$go" test -list '^Fuzz' "$pkg" | grep '^Fuzz' || true); do
		echo "== $pkg $name"
		"$go" test -run '^$' -fuzz "^$name\$" -fuzztime "$time" "$pkg"
	done
done
