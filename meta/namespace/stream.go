package namespace

import (
	"fmt"

	"penstock.io/penstock/meta"
)

// A stream's files and directories have the flag meta.FlagStream. Sessions that do not serve
// streams, such as mounts, can read, rename, remove and chmod them, and can't change the
// contents of the files or add names to the directories.

// keepStream refuses a change of the contents of a stream's file, or another name in a stream's
// directory, to a caller that does not serve streams. Errors: NotPermitted.
func (c *Context) keepStream(op string, in *inode) error {
	if in.Flags&meta.FlagStream == 0 || !c.NoStreams {
		return nil
	}
	return fail(op, meta.NotPermitted, fmt.Sprintf("inode %d belongs to a stream, to which only the gateways of streams write", in.Ino))
}

// markStream sets meta.FlagStream. Errors: NotPermitted (the caller does not serve streams),
// Invalid (neither a regular file nor a directory).
func (c *Context) markStream(in *inode) error {
	if c.NoStreams {
		return fail("mark stream", meta.NotPermitted, fmt.Sprintf("inode %d", in.Ino))
	}
	if !in.IsRegular() && !in.IsDir() {
		return fail("mark stream", meta.Invalid, fmt.Sprintf("inode %d is neither a regular file nor a directory", in.Ino))
	}
	in.Flags |= meta.FlagStream
	return nil
}
