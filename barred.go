package penstock

import (
	"sync"

	"penstock.io/penstock/meta"
)

// barred are the files whose exclusive leases were recalled by barriers of snapshots, and
// which had been written since the previous barrier. Each of their writers would ask for its
// lease again, with one request for each file. So the first writer asks for some hundred other
// leases along with its own (meta.Open.Also). The owner grants them like any lease, in the
// reply to an ordinary request: only after the barrier, and only if no other session has to
// give a lease up. For a lease that was not granted, or came too late, the file's own writer
// asks.
//
// The lease of a file without further writes is requested once: the next barrier takes the lease
// back, and does not add the file to the barred files.
type barred struct {
	mu   sync.Mutex
	inos map[meta.Ino]struct{}
}

// maxBarred bounds the barred files of a volume; the writers of further files ask for
// themselves.
const maxBarred = 1 << 16

// add is called with the inode's mu held.
func (b *barred) add(ino meta.Ino) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.inos == nil {
		b.inos = make(map[meta.Ino]struct{})
	}
	if len(b.inos) < maxBarred {
		b.inos[ino] = struct{}{}
	}
}

// others returns the files whose leases are to be requested with that of ino, which is about
// to be written: none if no barrier recalled the lease of ino. Each file is returned once.
func (b *barred) others(v *Volume, ino meta.Ino) (also []meta.Ino) {
	b.mu.Lock()
	if _, one := b.inos[ino]; one {
		delete(b.inos, ino)
		also = make([]meta.Ino, 0, min(len(b.inos), meta.MaxAlso))
		for other := range b.inos {
			if len(also) == meta.MaxAlso {
				break
			}
			also = append(also, other)
			delete(b.inos, other)
		}
	}
	b.mu.Unlock()
	n := 0
	for _, other := range also {
		in := v.c.table.peek(v.id, other)
		if in == nil {
			continue
		}
		in.mu.Lock()
		wants := in.lease == meta.LeaseShared && in.recall == nil && in.file != nil && in.file.mapOK
		in.mu.Unlock()
		in.put()
		if wants {
			also[n] = other
			n++
		}
	}
	return also[:n]
}
