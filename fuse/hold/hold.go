// Package hold owns the holder of mounts: a small process (Daemon) that has the descriptors
// of mounts, so that they outlive the processes that serve them, and how those processes
// speak to it (Client, Registration).
//
//	kernel --/dev/fuse-- device ---+           +--- penstock mount, serves
//	                               +-- Daemon --+--- its successor, waits until the first is gone
//	what is not durable -- memory -+   a socket +--- penstock hold --list, penstock csi
//
// Both ends of the socket (SOCK_SEQPACKET) demand of each other to be of the same user, or
// root. A request and its answer are one packet each, JSON, with descriptors beside it
// (SCM_RIGHTS). The daemon says one thing by itself: yield, to a process that serves a mount
// which another process is to take over.
//
//	request                     answer
//	hello VERSION               process of the daemon, which sessions are bound to; patience
//	put NAME COMMAND + 2 fds    the sender serves NAME from now on, found=true
//	take NAME [replace]         + 2 fds once no process serves NAME, or found=false
//	show NAME                   the mount with the command of its server, or none
//	list [AFTER]                mounts behind AFTER by name, more=true if that is not all
//	leave NAME                  the sender is about to end; answered, the mount is kept
//	drop NAME                   it was unmounted, and all is durable
//	                            yield NAME, from the daemon
//
//	packet   {"op": OP, "name": NAME, ...}        at most 256 KiB; see type packet
//	error    {"op": OP, "kind": KIND, "error": TEXT}   instead of an answer
//	fds      device (/dev/fuse), memory (a memfd, package meta/keep), in this order
//
// The daemon knows a server by its connection, which ends with the last thread of the
// process. So when the connection ends, nothing of the process writes to the device any more.
//
// At most one process serves a mount (record.server), or one is about to (record.successor),
// never both: taking needs that no process serves, and while one takes no other may put.
package hold

// Command says how the process that serves a mount was started, and how its successor is
// started.
type Command struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // with the name of the program
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
	OOM  int      `json:"oom,omitempty"` // its /proc/PID/oom_score_adj
}

// Mount is what a holder tells of one mount.
type Mount struct {
	Name string `json:"name"`          // the mount point
	PID  int    `json:"pid,omitempty"` // of the process that serves it; 0: none does
	// Awaited: no process serves it yet, and one is about to.
	Awaited bool    `json:"awaited,omitempty"`
	Taken   int     `json:"taken"` // how often it was taken over
	Command Command `json:"command,omitzero"`
}

// TakeoverEnv is set for a process that the holder starts: it is to take over,
// and not to mount.
const TakeoverEnv = "PENSTOCK_TAKEOVER"

// OOMEnv is set for a process that is to be killed for want of memory sooner than the process
// that starts it: its /proc/self/oom_score_adj, which it sets first of all.
const OOMEnv = "PENSTOCK_OOM_SCORE_ADJ"
