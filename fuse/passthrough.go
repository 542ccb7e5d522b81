package fuse

import (
	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

// openThrough opens a sealed file for passthrough: the kernel itself reads the backing file.
// An inode has one mode from its first open to its last close, and one backing file: the
// kernel refuses a cached open beside a passthrough open, or a second id, with EIO (rule 15).
// ok false: the caller must choose another mode.
func (f *fileSystem) openThrough(ctx request, v Volume, node uint64, ino meta.Ino, out *fuse.OpenOut) (ok bool) {
	if f.noPassthrough {
		return false
	}
	const mode = modePassthrough | modeNoFlush
	join := func(id int32) (joined, possible bool) {
		possible = true
		f.opens.with(node, true, func(n *openNode) {
			if n.through == 0 && (n.readers > 0 || n.mapped) {
				possible = false
				return
			}
			if n.through == 0 {
				if id == 0 {
					return
				}
				n.backing = id
			}
			n.count(mode, 1)
			out.BackingID, joined = n.backing, true
		})
		return joined, possible
	}
	joined, possible := join(0)
	if !joined {
		if !possible {
			return false
		}
		id, err := f.register(ctx, v, ino)
		if err != nil {
			if meta.KindOf(err) != meta.NotSupported {
				f.log.Debug("no passthrough", "node", node, "err", err)
			}
			return false
		}
		if joined, _ = join(id); !joined {
			f.conn.closeBacking(id)
			return false
		}
		if out.BackingID != id { // another open came first
			f.conn.closeBacking(id)
		}
	}
	out.Fh = f.opens.handle(mode)
	out.OpenFlags = fuse.FOPEN_PASSTHROUGH | fuse.FOPEN_NOFLUSH
	return true
}

// register gives the kernel a file's backing file and returns the kernel's id of the backing
// file.
func (f *fileSystem) register(ctx request, v Volume, ino meta.Ino) (int32, error) {
	file, err := v.Backing(ctx, ino)
	if err != nil {
		return 0, err
	}
	defer file.Close()
	return f.conn.openBacking(int(file.Fd()))
}
