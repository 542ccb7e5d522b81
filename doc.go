// Package penstock is the client library. It owns what one process keeps in
// memory of a Penstock tree: leased inodes and directory entries, buffered
// writes, the chunks it is writing, and the order in which they become
// durable. FUSE, streams, tables, CSI and the command line are its users; it
// can be used from a Go program without any mount.
//
// Operations name inodes; there are no handles: any operation on an inode
// works at any time, so that a mount's daemon can be replaced under a live
// mount. Open and Release only count.
//
// # What holds when a call returns
//
//   - Namespace operations (Create, Rename, Unlink, ...) are seen by every
//     client. They are durable after a later Fsync or SyncAll.
//   - Write has put the bytes where every client's next read sees them. They
//     are durable after Fsync or SyncAll.
//   - An error of a write that happened in the background is told once to
//     the next Write, Fsync or Flush of the inode.
//
// # How it stays right
//
// The owner of a volume decides in one order, and a session's replies, grants
// and recalls arrive in it. Whatever is cached about an inode is used only
// while a lease on it is held and the session's lease runs; see inode.go for
// what makes a reply cacheable, and recall.go for how a lease is given back.
package penstock
