package penstock

import (
	"sync"
	"sync/atomic"
	"time"

	"penstock.io/penstock/meta"
	metaclient "penstock.io/penstock/meta/client"
)

// openAhead fetches the maps of many files at once when many files are being opened: reading a
// tree of small files then costs one request for some dozens of files, not one for each.
//
// The fetched files have inode numbers in the same aligned block as the opened file: files
// made together are read together, in any order. Only inodes with cached attributes are
// included, so files neither listed nor looked up are not.
//
// A fetched map counts as used or, if dropped before any use, as unused. An epoch of training
// opens each of many files once, in random order, so most fetched maps wait for long before
// their use. (A bound on the waiting time would count the waiting maps as unused.) The number
// of waiting maps is bounded. Fetching stops when most of the finished maps were unused, and
// resumes after many more opens that had to send a request.
type openAhead struct {
	v *Volume

	mu     sync.Mutex
	misses int                        // opens that sent a request, since fetching last stopped
	runs   map[meta.Ino]chan struct{} // blocks that are being fetched; closed afterwards

	asked, used, unused atomic.Int64
}

const (
	aheadBlock  = 64
	aheadAfter  = 4 // misses before fetching begins
	aheadTrial  = 4 * aheadBlock
	aheadAgain  = 16 * aheadBlock        // misses before fetching is tried again
	aheadRuns   = 4                      // at the same time
	aheadWasted = 4                      // most fetched maps for each used map
	aheadMost   = 1 << 16                // most maps that wait for their use
	aheadWait   = 250 * time.Millisecond // longest time that an open waits for its block
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

// fetch notes that the map of a file must be fetched. If a fetch of the file's block is
// under way, it returns a channel that is closed at the end of the fetch.
func (o *openAhead) fetch(ino meta.Ino) <-chan struct{} {
	v := o.v
	if v.index.inUse() != nil {
		return nil // opening such a file costs no request
	}
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
		o.block(block)
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
	return in.attrOK && in.lease != meta.LeaseNone && in.attr.IsRegular() && in.attr.Size > 0 && in.recall == nil && (f == nil || !f.mapOK && f.turns.want == 0)
}

// block fetches the maps of the files in one block of inode numbers.
func (o *openAhead) block(block meta.Ino) {
	v := o.v
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
		// The lease is already held: a request for the lease could wait behind a recall.
		ops = append(ops, batchOp{Op: &meta.Open{Ino: ino}, Want: meta.LeaseNone})
	}
	if len(ops) == 0 {
		return
	}
	res, errs, stamp, err := v.owner.doBatch(v.c.ctx, metaclient.AnyEpoch, ops)
	for i, in := range ins {
		if err == nil && errs[i] == nil && res[i].EOF {
			var sn snapshot
			sn.add(v, &res[i], 0)
			in.mu.Lock()
			if in.installLocked(&sn, &res[i].Attr, stamp.with(&res[i]), gens[i]) {
				in.file.ahead = true
				o.asked.Add(1)
			}
			in.mu.Unlock()
		}
		in.put()
	}
}
