// Package hold owns the holder of mounts: a small process (Daemon) with the descriptors of
// mounts, so that mounts outlive the processes serving the mounts. It also owns the protocol
// between holder and processes (Client, Registration).
//
//	kernel --/dev/fuse-- device ---+           +--- penstock mount, serves
//	                               +-- Daemon --+--- its successor, waits until the first is gone
//	what is not durable -- memory -+   a socket +--- penstock hold --list, penstock csi
//
// Each end of the socket (SOCK_SEQPACKET) demands that the other end's user is the same, or
// root. A request and its answer are one packet each, JSON, with descriptors as ancillary data
// (SCM_RIGHTS). The daemon sends only yield without a request, to the server of a mount when
// another process will take over the mount.
//
//	request                     answer
//	hello VERSION               the daemon's process, to which sessions are bound; patience
//	put NAME COMMAND + 2 fds    the sender serves NAME from now on, found=true
//	take NAME [replace]         + 2 fds once no process serves NAME, or found=false
//	show NAME                   the mount with the command of its server, or none
//	list [AFTER]                mounts after AFTER by name; more=true: further mounts follow
//	leave NAME                  the sender is about to end; after the answer the mount is kept
//	drop NAME                   the mount has ended, and all bytes are durable
//	                            yield NAME, from the daemon
//
//	packet   {"op": OP, "name": NAME, ...}        at most 256 KiB; see type packet
//	error    {"op": OP, "kind": KIND, "error": TEXT}   instead of an answer
//	fds      device (/dev/fuse), memory (a memfd, package meta/keep), in this order
//
// The daemon identifies a server by the server's connection, which ends with the last thread
// of the process. So after the end of the connection the process can't write to the device any
// more.
//
// A mount has at most one server (record.server) or one successor (record.successor), never
// both. A take succeeds only while no process serves the mount, and a put by another process
// fails while a successor exists.
package hold

// Command describes how a mount's server was started, and how the holder starts a successor.
type Command struct {
	Path string   `json:"path"`
	Args []string `json:"args"` // with the name of the program
	Env  []string `json:"env"`
	Dir  string   `json:"dir"`
	OOM  int      `json:"oom,omitempty"` // the server's /proc/PID/oom_score_adj
}

// Mount is a holder's description of one mount.
type Mount struct {
	Name string `json:"name"`          // the mount point
	PID  int    `json:"pid,omitempty"` // of the server; 0: no server
	// Awaited: a process has taken the mount and does not serve yet.
	Awaited bool    `json:"awaited,omitempty"`
	Taken   int     `json:"taken"` // number of take-overs
	Command Command `json:"command,omitzero"`
}

// TakeoverEnv is set for a process started by the holder: the process must take over the mount
// instead of mounting.
const TakeoverEnv = "PENSTOCK_TAKEOVER"

// OOMEnv is the oom_score_adj for a process which, when memory is short, should be killed
// before the process's parent. The process writes /proc/self/oom_score_adj before all else.
const OOMEnv = "PENSTOCK_OOM_SCORE_ADJ"
