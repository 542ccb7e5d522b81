#!/bin/sh
# Replaces the pods of the driver on the nodes that are of an older version than was
# asked for, one node at a time, each when the one before is ready. Where the kernel is
# Linux 6.9 or later, the holder runs and the old pod has left its mounts to it (--hold)
# where the new one looks for them, pods that use volumes see a pause. Elsewhere their mounts end with the driver's pod:
# such a node is left alone, and named at the end, or with --drain it is drained before
# and used again after. Started again it goes on with those that are left; so it does by
# itself if another version is asked for meanwhile.
#
#   deploy/kubernetes/roll-nodes.sh [--drain] [NAMESPACE]
set -eu
drain=
if [ "${1:-}" = --drain ]; then
	drain=yes
	shift
fi
ns=${1:-penstock-system}
# What kubectl says is assigned before it is used: sh does not see that it failed in a
# test, nor in the words of a loop.
k() { kubectl -n "$ns" "$@"; }
app=app.kubernetes.io/name=penstock
node=$app,app.kubernetes.io/component=node

# newest is the version that is asked for.
newest() {
	k get controllerrevisions -l "$node" --sort-by=.revision -o 'jsonpath={.items[-1:].metadata.labels.controller-revision-hash}'
}

# places are the words of arguments, a list in JSON, that say where a driver leaves its
# mounts and what it remembers of them.
places() { printf '%s' "$1" | tr ',[]' '\n\n\n' | grep -E '^"--(hold|state-dir)=' | sort; }

# holds tells whether pods on a node keep their mounts while the driver's pod there is
# replaced: it is that one which has given them to the holder, or not, and the next one
# must look for them at the same place. A kernel whose version can't be read counts as an
# old one.
holds() {
	args=$(k get pod "$2" -o 'jsonpath={.spec.containers[*].args}') || exit
	next=$(k get daemonset penstock-node -o 'jsonpath={.spec.template.spec.containers[*].args}') || exit
	case $args in
	*'"--hold='*) ;;
	*) return 1 ;;
	esac
	[ "$(places "$args")" = "$(places "$next")" ] || return 1
	holder=$(k get pods -l "$app,app.kubernetes.io/component=hold" --field-selector "spec.nodeName=$1" \
		-o 'jsonpath={.items[*].status.containerStatuses[*].ready}') || exit
	[ "$holder" = true ] || return 1
	kernel=$(k get node "$1" -o 'jsonpath={.status.nodeInfo.kernelVersion}') || exit
	major=${kernel%%.*}
	rest=${kernel#*.}
	minor=${rest%%[!0-9]*}
	[ "$major" -gt 6 ] 2>/dev/null || { [ "$major" = 6 ] && [ "$minor" -ge 9 ] 2>/dev/null; }
}

while
	asked=$(k get daemonset penstock-node -o 'jsonpath={.metadata.generation}') || exit
	seen=$(k get daemonset penstock-node -o 'jsonpath={.status.observedGeneration}') || exit
	[ -z "$asked" ] || [ "$asked" != "$seen" ]
do sleep 1; done
new=$(newest)
first=$new
if [ -z "$new" ]; then
	echo "the driver has no version in namespace $ns" >&2
	exit 1
fi
left=
cordoned=
trap '[ -z "$cordoned" ] || echo "$cordoned is not used for new pods: kubectl uncordon $cordoned" >&2' EXIT
pods=$(k get pods -l "$node" -o 'jsonpath={range .items[*]}{.metadata.name}={.spec.nodeName}={.metadata.labels.controller-revision-hash}{"\n"}{end}')
for line in $pods; do
	pod=${line%%=*}
	rest=${line#*=}
	on=${rest%%=*}
	[ "${rest#*=}" != "$new" ] || continue
	back=
	if ! holds "$on" "$pod"; then
		if [ -z "$drain" ]; then
			left="$left $on"
			continue
		fi
		# One that is kept free by somebody else stays so.
		free=$(k get node "$on" -o 'jsonpath={.spec.unschedulable}')
		if [ "$free" != true ]; then
			back=yes
			cordoned=$on
		fi
		k drain "$on" --ignore-daemonsets --delete-emptydir-data
	fi
	echo "$on"
	k delete pod "$pod" >/dev/null
	until
		# Another one may be asked for by now, and is what comes then.
		now=$(newest)
		new=${now:-$new}
		ready=$(k get pods -l "$node,controller-revision-hash=$new" --field-selector "spec.nodeName=$on" \
			-o 'jsonpath={.items[*].status.containerStatuses[*].ready}')
		[ "$ready" = true ]
	do sleep 1; done
	if [ -n "$back" ]; then
		k uncordon "$on"
		cordoned=
	fi
done
if [ "$new" != "$first" ]; then
	exec sh "$0" ${drain:+--drain} "$ns"
fi
if [ -n "$left" ]; then
	echo "not replaced, since pods there would lose their mounts:$left" >&2
	echo "again with --drain each of them is drained before" >&2
	exit 1
fi
echo "the driver is of the new version on all nodes"
