#!/bin/sh
# Replaces the servers of a penstock-cluster release that are of an older version than
# was asked for: metadata servers first, then chunk servers, one pod at a time, each
# only while all chunks have their replicas and every server answers. Started again it
# goes on with those that are left.
#
#   deploy/kubernetes/roll.sh [NAMESPACE]
set -eu
ns=${1:-penstock-system}
# What kubectl says is assigned before it is used: sh does not see that it failed in a
# test, nor in the words of a loop.
k() { kubectl -n "$ns" "$@"; }
app=app.kubernetes.io/name=penstock-cluster

# well waits until some metadata server says that all is well, three times in a row: a
# server that went is on the list for a moment.
well() {
	times=0
	said=
	out="no metadata server's pod is there"
	until [ "$times" = 3 ]; do
		good=
		# If this fails there are none, and it is tried again.
		for server in $(k get pods -l "$app,app.kubernetes.io/component=meta" -o name); do
			if out=$(k exec "$server" -c penstock -- /penstock cluster status --check --for-upgrade 2>&1); then
				good=yes
				break
			fi
		done
		if [ -n "$good" ]; then
			times=$((times + 1))
		else
			times=0
			[ "$out" = "$said" ] || printf '%s\n' "$out" >&2
			said=$out
		fi
		sleep 1
	done
}

sets=$(k get statefulsets -l "$app" -o name)
if [ -z "$sets" ]; then
	echo "there is no penstock-cluster release in namespace $ns" >&2
	exit 1
fi
for component in meta chunkserver; do
	for set in $sets; do
		is=$(k get "$set" -o 'jsonpath={.spec.template.metadata.labels.app\.kubernetes\.io/component}')
		[ "$is" = "$component" ] || continue
		# The status is of this generation, so the revision is that of the new version.
		while
			asked=$(k get "$set" -o 'jsonpath={.metadata.generation}') || exit
			seen=$(k get "$set" -o 'jsonpath={.status.observedGeneration}') || exit
			[ -z "$asked" ] || [ "$asked" != "$seen" ]
		do sleep 1; done
		new=$(k get "$set" -o 'jsonpath={.status.updateRevision}')
		name=${set#*/}
		pods=$(k get pods -l "$app,penstock.io/set=${name#penstock-chunkserver-}" -o name)
		for pod in $pods; do
			hash=$(k get "$pod" -o 'jsonpath={.metadata.labels.controller-revision-hash}')
			[ "$hash" != "$new" ] || continue
			well
			echo "$pod"
			k delete "$pod" >/dev/null
			until k wait --for=condition=Ready "$pod" --timeout=60s >/dev/null 2>&1; do sleep 1; done
		done
	done
done
well
echo "all servers are of the new version"
