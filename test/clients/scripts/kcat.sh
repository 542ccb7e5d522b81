# Cases of kcat. Prints "CASE<tab>passed" or "CASE<tab>why it failed". kcat makes no topics:
# the topics kcat-0 to kcat-9 exist.
addr=$1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
case_of() { # name, command...
	name=$1
	shift
	if "$@" >"$dir/out" 2>&1; then
		printf '%s\tpassed\n' "$name"
	else
		printf '%s\t%s\n' "$name" "$(tr '\n\t' '  ' <"$dir/out" | tail -c 300)"
	fi
}
seq 1000 >"$dir/lines"
head -c 1000000 /dev/zero | tr '\0' x >"$dir/big"
roundtrip() { # topic, options
	topic=$1
	shift
	kcat -q -b "$addr" -P -t "$topic" -p 0 "$@" <"$dir/lines" &&
		timeout 60 kcat -q -b "$addr" -C -t "$topic" -p 0 -o beginning -e >"$dir/got" && cmp "$dir/lines" "$dir/got"
}
i=0
for codec in none gzip snappy lz4 zstd; do
	case_of "plain $codec" roundtrip "kcat-$i" -z "$codec"
	i=$((i + 1))
done
case_of idempotent roundtrip kcat-5 -X enable.idempotence=true
headers() {
	printf 'k:v' | kcat -q -b "$addr" -P -t kcat-6 -p 0 -K : -H a=1 &&
		[ "$(timeout 60 kcat -q -b "$addr" -C -t kcat-6 -p 0 -o beginning -e -f '%k %s %h')" = 'k v a=1' ]
}
case_of headers headers
by_time() { kcat -q -b "$addr" -Q -t kcat-0:0:1 | grep -q 'offset 0'; }
case_of 'lookup by time' by_time
