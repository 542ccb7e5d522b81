package namespace

import (
	"encoding/binary"
	"fmt"

	"penstock.io/penstock/meta"
)

// The check decodes records apart from records.go on purpose.

// walker takes a record apart.
type walker struct {
	b       []byte
	damaged bool
}

func (w *walker) take(n int) []byte {
	if n < 0 || n > len(w.b) {
		w.damaged, w.b = true, nil
		return nil
	}
	v := w.b[:n]
	w.b = w.b[n:]
	return v
}

func (w *walker) u8() byte {
	if v := w.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (w *walker) u64() uint64 {
	if v := w.take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

// n is a varint: seven bits a byte, the lowest first.
func (w *walker) n() (v uint64) {
	for shift := uint(0); shift < 64; shift += 7 {
		b := w.take(1)
		if b == nil {
			return 0
		}
		v |= uint64(b[0]&0x7f) << shift
		if b[0] < 0x80 {
			return v
		}
	}
	w.damaged = true
	return 0
}

func (w *walker) done(version byte) string {
	switch {
	case w.damaged:
		return "it is too short"
	case version != 1:
		return fmt.Sprintf("version %d", version)
	case len(w.b) != 0:
		return fmt.Sprintf("%d bytes too many", len(w.b))
	}
	return ""
}

type wireInode struct {
	mode, nlink, flags uint32
	size, blocks       uint64
	parent, next       uint64
	data               uint64 // length
	bytes              []byte // of a regular file
	holders            uint32
	reap               bool
	open               uint64 // where the open-ended extent begins
}

func readInode(v []byte) (r wireInode, problem string) {
	w := walker{b: v}
	ver, bits := w.u8(), w.u8()
	r.mode, r.nlink = uint32(w.n()), uint32(w.n())
	w.n() // owner
	w.n() // group
	r.flags = uint32(w.n())
	w.n() // change
	r.size, r.blocks = w.n(), w.n()
	w.u64() // four times
	w.n()
	w.n()
	w.n()
	switch r.mode >> 12 {
	case 4:
		r.parent, r.next = w.n(), w.n()
	case 2, 6:
		w.n()
	case 10:
		r.data = w.n()
		w.take(int(min(r.data, 1<<20)))
		if r.data != r.size {
			return r, fmt.Sprintf("a link of size %d holds %d bytes", r.size, r.data)
		}
	case 8:
		if r.flags&uint32(meta.FlagInline) != 0 {
			r.data = w.n()
			r.bytes = w.take(int(min(r.data, 1<<20)))
			if r.data == 0 || r.data > meta.InlineMax || r.data > r.size {
				return r, fmt.Sprintf("%d inline bytes in a file of %d", r.data, r.size)
			}
		}
	case 1, 12:
	default:
		return r, fmt.Sprintf("mode %o", r.mode)
	}
	if r.nlink == 0 {
		r.holders = uint32(w.n())
	}
	if bits&1 != 0 {
		if tmp := w.u64(); r.nlink != 0 || tmp == 0 {
			return r, fmt.Sprintf("a temporary file of session %x with %d links", tmp, r.nlink)
		}
	}
	if bits&2 != 0 {
		r.reap = true
		w.n() // from where on
	}
	if r.flags&uint32(meta.FlagOpenEnded) != 0 {
		r.open = w.n()
	}
	if bits&4 != 0 {
		if home := w.n(); home == 0 && !w.damaged {
			return r, "its name is in directory 0"
		}
		w.n() // the name's cookie
	}
	if bits > 7 {
		return r, fmt.Sprintf("bits %x", bits)
	}
	return r, w.done(ver)
}

type wireVolume struct {
	id, gen, nextIno, inodes, bytes, chunks uint64
	lastSnap, snaps, buried                 uint64
	clone                                   bool
	tally                                   byte
	tallied                                 int64
	tallyRef                                uint64
	firstEvent, nextEvent                   uint64
	gaps                                    [][2]uint64 // generations above the first, up to the second
}

func readVolume(v []byte) (r wireVolume, problem string) {
	w := walker{b: v}
	ver, parts := w.u8(), w.u8()
	r.id, r.gen, r.nextIno, r.inodes, r.bytes, r.chunks = w.n(), w.n(), w.n(), w.n(), w.n(), w.n()
	w.n() // quotas
	w.n()
	w.n() // replicas
	w.n() // largest chunk
	w.u8()
	if parts > 63 {
		return r, fmt.Sprintf("parts %x", parts)
	}
	if parts&1 != 0 {
		if place, spread := w.u8(), w.u8(); place > 3 || spread > 2 {
			return r, fmt.Sprintf("placement %d, spread %d", place, spread)
		}
		w.take(int(min(w.n(), 1<<20))) // topology
		w.take(int(min(w.n(), 1<<20))) // class
	}
	if parts&2 != 0 {
		r.lastSnap, r.snaps, r.buried = w.n(), w.n(), w.n()
	}
	r.clone = parts&4 != 0
	events, tally, least := parts&8 != 0, parts&16 != 0, parts&32 != 0
	if r.clone {
		before := uint64(0)
		for n := w.n(); n > 0 && !w.damaged; n-- {
			lo, hi := w.n(), w.n()
			if lo < before || lo >= hi || hi >= r.gen {
				return r, fmt.Sprintf("a gap of generations from %d to %d in %d", lo, hi, r.gen)
			}
			r.gaps, before = append(r.gaps, [2]uint64{lo, hi}), hi
		}
	}
	if events {
		keep := w.n()
		r.firstEvent, r.nextEvent = w.n(), w.n()
		if r.firstEvent == 0 || r.firstEvent > r.nextEvent || keep == 0 && r.firstEvent != r.nextEvent {
			return r, fmt.Sprintf("%d events are kept, of %d to %d", keep, r.firstEvent, r.nextEvent)
		}
	}
	if tally {
		if problem := r.tallyWords(&w); problem != "" && !w.damaged {
			return r, problem
		}
	}
	if least && w.n() == 0 && !w.damaged {
		return r, "a least number of replicas of 0"
	}
	if r.gen == 0 {
		return r, "generation 0"
	}
	return r, w.done(ver)
}
