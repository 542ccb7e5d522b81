#!/bin/bash
# limit.sh SECONDS LOG COMMAND...: runs a command in a session of its own, shows
# what it prints, keeps that in LOG, and ends with the command's status. When the
# time is over it tells which processes wait where in the kernel, ends the session,
# and exits with 124: also if some of it can't be ended, since what they print goes
# to a file and nobody waits for its end.
set -uo pipefail
limit=$1 log=$2
shift 2

# of DIR: reads the state and the session of a process or thread; its name may
# have spaces.
of() {
	local stat
	read -r stat <"$1/stat" || return
	stat=(${stat##*) })
	state=${stat[0]} session=${stat[3]}
} 2>/dev/null

# waits tells which threads of the session wait where, but for those that are idle,
# and of all others which stand still, with the kernel's stacks of these.
waits() {
	local dir task at cmd
	for dir in /proc/[0-9]*; do
		for task in "$dir"/task/*; do
			of "$task" || continue
			read -r at <"$task/wchan"
			case $state:$session:$at in
			D:* | T:* | t:*) ;;
			R:* | S:*:futex_* | S:*:*nanosleep | S:*poll* | S:*:do_wait) continue ;;
			S:$command:*) ;;
			*) continue ;;
			esac
			cmd=$(tr '\0' ' ' <"$dir/cmdline" | cut -c1-160)
			echo "${task#/proc/} $state ${at:-?} ${cmd:-(kernel)}"
			[ "$state" = S ] || sed 's/^/    /' "$task/stack"
		done
	done
} 2>/dev/null

: >"$log"
setsid "$@" >"$log" 2>&1 </dev/null &
command=$!
tail -n +1 -f --pid=$command "$log" &
shown=$!

end=$((SECONDS + limit))
while kill -0 $command 2>/dev/null; do
	if [ $SECONDS -lt $end ]; then
		sleep 0.5
		continue
	fi
	echo "limit: $limit s are over; who waits where in the kernel:"
	waits
	kill -TERM -- -$command 2>/dev/null # it may say what it was about
	for _ in $(seq 50); do
		kill -0 $command 2>/dev/null || break
		sleep 0.1
	done
	sleep 1 # what it said is shown
	for dir in /proc/[0-9]*; do
		of "$dir" && [ "$session" = $command ] && kill -KILL "${dir#/proc/}" 2>/dev/null
	done
	kill $shown 2>/dev/null
	exit 124
done
wait $command
status=$?
wait $shown
exit $status
