package penstock

import (
	"sync"

	"penstock.io/penstock/meta"
)

// barred are the files whose exclusive leases barriers of snapshots took back, and
// that had been written since the barrier before. Each of their writers would ask for
// its lease again, one request a file. So whoever comes first asks for some hundred
// others along with its own (meta.Open.Also). They are granted as any lease is, in the
// reply of an ordinary request: only after the barrier, only where nobody has to give
// something up for it, and nothing is promised to who asks. What was not granted, or
// came too late, its own writer asks for.
//
// A file that nobody writes any more is asked for once: its lease goes with the next
// barrier, and it is not among these then.
type barred struct {
	mu   sync.Mutex
	inos map[meta.Ino]struct{}
}

// maxBarred bounds the files that are remembered of a volume; the writers of others
// ask for themselves.
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

// others are to be asked for with ino, which is going to be written: none if no barrier
// took it back. Each is given out once.
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
