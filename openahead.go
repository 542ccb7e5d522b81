package penstock

import (
	"sync"
	"sync/atomic"

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
// not listed or looked up. It stops when most of what it brought goes unused.
type openAhead struct {
	mu     sync.Mutex
	misses int // opens that had to ask
	last   meta.Ino
	runs   int

	asked, used atomic.Int64
}

const (
	aheadBlock  = 64
	aheadAfter  = 4 // misses before it begins
	aheadTrial  = 4 * aheadBlock
	aheadRuns   = 2 // at the same time
	aheadWasted = 4 // asked for each one used, at most
)

// openAhead books a file whose map had to be asked for.
func (v *Volume) openAhead(ino meta.Ino) {
	if v.indexed() != nil {
		return // to open one costs no request
	}
	o := &v.opens
	o.mu.Lock()
	o.misses++
	block := ino &^ (aheadBlock - 1)
	begin := o.misses >= aheadAfter && o.last != block && o.runs < aheadRuns &&
		(o.asked.Load() < aheadTrial || o.used.Load()*aheadWasted >= o.asked.Load())
	if begin {
		o.last = block
		o.runs++
	}
	o.mu.Unlock()
	if !begin {
		return
	}
	v.c.spawn(func() {
		v.openBlock(block, ino)
		o.mu.Lock()
		o.runs--
		o.mu.Unlock()
	})
}

// openBlock asks for the maps of the files of one block of inode numbers.
func (v *Volume) openBlock(block, except meta.Ino) {
	var ins []*inode
	var gens []uint32
	var ops []batchOp
	for ino := block; ino < block+aheadBlock; ino++ {
		if ino == except {
			continue
		}
		in := v.c.table.peek(v.id, ino)
		if in == nil {
			continue
		}
		in.mu.Lock()
		f := in.file
		want := in.attrOK && in.lease != meta.LeaseNone && in.attr.IsRegular() && in.attr.Size > 0 && in.recall == nil && (f == nil || !f.mapOK && f.want == 0)
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
