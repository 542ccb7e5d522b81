package penstock

import (
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// openAhead asks for the maps of many files at once when many are opened:
// reading a tree of small files then costs a request for some dozens of files
// instead of one for each.
//
// Which files? Those whose inode numbers lie in the same aligned block as the
// one just opened: files made together are read together, in whatever order.
// Only inodes whose attributes are cached are asked for, so nothing that was
// not listed or looked up.
//
// What was brought is judged when it is over: used, or given up unused. An epoch of
// training opens each of many files once, in an order of chance, so most of what is
// asked for waits for long, and all of it is used; judged by what is used soon, it
// would end at once. What waits is bounded. It stops when most of what is over was
// unused, and is tried again after many more opens that had to ask.
type openAhead struct {
	mu     sync.Mutex
	misses int                        // opens that had to ask, since it stopped last
	runs   map[meta.Ino]chan struct{} // the blocks that are being asked for; closed after it

	asked, used, unused atomic.Int64
}

const (
	aheadBlock  = 64
	aheadAfter  = 4 // misses before it begins
	aheadTrial  = 4 * aheadBlock
	aheadAgain  = 16 * aheadBlock        // misses after which it is tried again
	aheadRuns   = 4                      // at the same time
	aheadWasted = 4                      // asked for each one used, at most
	aheadMost   = 1 << 16                // that wait to be used
	aheadWait   = 250 * time.Millisecond // that an open waits for its block
)

// mayAhead decides, with mu held, whether more is to be asked for; most is how many
// files may wait.
func (o *openAhead) mayAhead(most int64) bool {
	asked, used, unused := o.asked.Load(), o.used.Load(), o.unused.Load()
	over := used + unused
	if over >= aheadTrial && used*aheadWasted < over {
		if o.misses < aheadAgain {
			return false
		}
		o.misses = aheadAfter
		o.asked.Add(-over)
		o.used.Add(-used)
		o.unused.Add(-unused)
		over, asked = 0, asked-over
	}
	return o.misses >= aheadAfter && len(o.runs) < aheadRuns && asked-over < most
}

// openAhead books a file whose map has to be asked for. If that of it and its neighbours
// is being asked for now, it gives what tells the end of that.
func (v *Volume) openAhead(ino meta.Ino) <-chan struct{} {
	if v.indexed() != nil {
		return nil // to open one costs no request
	}
	o := &v.opens
	o.mu.Lock()
	defer o.mu.Unlock()
	o.misses++
	block := ino &^ (aheadBlock - 1)
	if done, ok := o.runs[block]; ok {
		return done
	}
	if !o.mayAhead(min(aheadMost, int64(v.c.cfg.MetaCache)/4)) {
		return nil
	}
	if o.runs == nil {
		o.runs = make(map[meta.Ino]chan struct{})
	}
	done := make(chan struct{})
	o.runs[block] = done
	v.c.spawn(func() {
		v.openBlock(block)
		o.mu.Lock()
		delete(o.runs, block)
		o.mu.Unlock()
		close(done)
	})
	return done
}

// aheadLocked tells whether the map of a file may be asked for with others. mu is held.
func (in *inode) aheadLocked() bool {
	f := in.file
	return in.attrOK && in.lease != meta.LeaseNone && in.attr.IsRegular() && in.attr.Size > 0 && in.recall == nil && (f == nil || !f.mapOK && f.want == 0)
}

// openBlock asks for the maps of the files of one block of inode numbers.
func (v *Volume) openBlock(block meta.Ino) {
	var ins []*inode
	var gens []uint32
	var ops []batchOp
	for ino := block; ino < block+aheadBlock; ino++ {
		in := v.c.table.peek(v.id, ino)
		if in == nil {
			continue
		}
		in.mu.Lock()
		f := in.file
		want := in.aheadLocked()
		gen := uint32(0)
		if f != nil {
			gen = f.mapGen
		}
		in.mu.Unlock()
		if !want {
			in.put()
			continue
		}
		ins, gens = append(ins, in), append(gens, gen)
		// The lease is held: asking for it again could wait behind a recall.
		ops = append(ops, batchOp{Op: &meta.Open{Ino: ino}, Want: meta.LeaseNone})
	}
	if len(ops) == 0 {
		return
	}
	res, errs, stamp, err := v.doBatch(v.c.ctx, metaclient.AnyEpoch, ops)
	for i, in := range ins {
		if err == nil && errs[i] == nil && res[i].EOF {
			var sn snapshot
			sn.add(v, &res[i], 0)
			in.mu.Lock()
			if in.installLocked(&sn, &res[i].Attr, stamp.with(&res[i]), gens[i]) {
				in.file.ahead = true
				v.opens.asked.Add(1)
			}
			in.mu.Unlock()
		}
		in.put()
	}
}
