package fuse

import (
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The ids of the thread behind a request. A kernel able to map the ids of a mount
// (FUSE_ALLOW_IDMAP, Linux 6.12: a pod with its own user namespace) sends ids only with
// requests that create an inode, mapped. Every other request has noID for both ids; the kernel
// has already checked the caller's rights. The few requests that still depend on the caller
// read the caller's ids from /proc.

// noID stands for an unknown user or group in a request.
const noID = math.MaxUint32

// caller has the ids of a requesting thread. noID is an unknown id.
type caller struct {
	uid, gid uint32
	groups   []string // the supplementary groups, in decimal
}

// callerOf returns the ids of a requesting thread, as numbered in the initial user namespace.
// If the thread is gone, each id missing in the request is noID, and the supplementary groups
// are empty.
func callerOf(h *fuse.InHeader) caller {
	c := caller{uid: h.Uid, gid: h.Gid}
	b, err := os.ReadFile("/proc/" + strconv.FormatUint(uint64(h.Pid), 10) + "/status")
	if err != nil {
		return c
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		switch key {
		case "Uid":
			c.uid = fileSystemID(c.uid, fields)
		case "Gid":
			c.gid = fileSystemID(c.gid, fields)
		case "Groups":
			c.groups = fields
		}
	}
	return c
}

// fileSystemID returns the id of a request or, if the request has noID, the last of the
// thread's four ids, which decides in file systems.
func fileSystemID(told uint32, ids []string) uint32 {
	if told != noID || len(ids) != 4 {
		return told
	}
	id, err := strconv.ParseUint(ids[3], 10, 32)
	if err != nil {
		return told
	}
	return uint32(id)
}

// inGroup reports whether gid is the thread's group or a supplementary group.
func (c caller) inGroup(gid uint32) bool {
	return c.gid == gid || slices.Contains(c.groups, strconv.FormatUint(uint64(gid), 10))
}
