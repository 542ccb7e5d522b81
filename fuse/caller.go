package fuse

import (
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/hanwen/go-fuse/v2/fuse"
)

// The ids of the thread behind a request. A kernel that may map the ids of a mount
// (FUSE_ALLOW_IDMAP, Linux 6.12: a pod with a user namespace of its own) sends them
// only with requests that create an inode, mapped. Every other request has noID for
// both; the kernel has checked the rights of the caller before. The few requests that
// depend on the caller all the same read its ids from /proc.

// noID stands in a request that tells neither the user nor the group.
const noID = math.MaxUint32

// caller has the ids of a thread that made a request. noID is an id that nobody knows.
type caller struct {
	uid, gid uint32
	groups   []string // the supplementary groups, in decimal
}

// callerOf gives the ids of the thread that made a request, as the initial user
// namespace counts them. A thread that is gone has noID for each id that the request
// does not tell, and no supplementary groups.
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

// fileSystemID gives the id of a request or, if the request does not tell it, the last
// of the four that a thread has: the one that decides in file systems.
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

// inGroup reports whether the thread has a group, as its own or as a supplementary one.
func (c caller) inGroup(gid uint32) bool {
	return c.gid == gid || slices.Contains(c.groups, strconv.FormatUint(uint64(gid), 10))
}
