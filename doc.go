// Package penstock is the client library. A Client keeps in memory, for one process: leased
// inodes and directory entries, buffered writes, the open chunks it appends to, and the order
// in which writes become durable. FUSE, streams, tables, CSI and the command line use the
// package; a Go program can use it without a mount.
//
// A program calls Dial, opens a Volume of the Client, and names files by path in the volume's
// Tree; the examples show how to walk, write, read, open a snapshot, clone and follow events.
// Volumes, snapshots and the rest of the cluster are administered with package meta/admin.
//
// Operations name inodes; there are no handles. Any operation on an inode works at any time,
// so that a mount's daemon can be replaced under a live mount. Open and Release only count
// openers.
//
// # What holds when a call returns
//
//   - Namespace operations (Create, Rename, Unlink, ...) are visible to every client. They are
//     durable after a later Fsync or SyncAll.
//   - The bytes of a Write are visible to every client's next read. They are durable after Fsync
//     or SyncAll.
//   - The error of a write in the background is returned once: by the next Write, Fsync or Flush
//     of the inode.
//
// # Why cached data is right
//
// The owner of a volume decides in one order; replies, grants and recalls reach a session in
// the same order. The client uses a cached fact about an inode only while it holds a lease on
// the inode and the session's lease is valid. inode.go says when a reply may be cached, and
// recall.go how a lease is given back.
package penstock
