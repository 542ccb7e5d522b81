package fuse

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// How a mount outlives the process that serves it.
//
// A connection to the kernel lives as long as anybody has its descriptor, so a
// holder (package fuse/hold) has it, and with it the memory in which the process that
// serves keeps what its successor needs (package keep). The successor
//
//  1. waits until the predecessor is gone, and gets both descriptors;
//  2. goes on with its session, puts back what was not committed (penstock.Dial),
//     opens again what was open;
//  3. has its own protocol server read the INIT of then, and throws the answer
//     away: the kernel had one;
//  4. gives the holder a memory of its own, in which all of this is;
//  5. has the kernel send again what the predecessor had read and not answered
//     (FUSE_NOTIFY_RESEND), and serves.
//
// Killed before step 4, it leaves the predecessor's memory as it was, and another
// may try. It makes no difference whether the predecessor was killed or asked to
// go: asked, it makes things durable first, and exits.
//
// A request that is sent again may have been executed. Operations of owners have
// numbers, so that they are executed once; a WRITE is repeated at the same place
// (penstock.Call.Resent); an OPEN that was counted is counted back here.

// Succession is what a mount needs to leave itself to a successor.
type Succession struct {
	Memory *keep.Memory // the client's
	// Put hands the device and the memory to the holder, with the kernel's number of
	// the connection; the caller keeps its own descriptors.
	Put func(connection uint64, device, memory int) error
	// Predecessor is what a predecessor left, and Device the connection's descriptor, which
	// becomes the mount's; nil: there is none, and New mounts.
	Predecessor *Predecessor
	Device      int
	// Session is the client's, and Count counts requests in it.
	Session meta.SessionID
	Count   interface {
		Begin() uint32
		End(turn uint32)
	}
	// Resumed is called when what was open is open again.
	Resumed func()

	device *os.File // that Device is
	asked  string   // as of head
	base   meta.VolumeID
}

// Predecessor is a memory that the process before this one left, with its head.
type Predecessor struct {
	*keep.Memory
	head head
}

// head is what generations of one mount agree on.
type head struct {
	Dir         string         `json:"dir"`
	Source      string         `json:"source"`
	Volume      meta.VolumeID  `json:"volume"`
	Root        meta.Ino       `json:"root"`
	Incarnation uint64         `json:"incarnation"`
	Session     meta.SessionID `json:"session"`
	Generation  uint32         `json:"generation"` // of the process that wrote it
	Init        []byte         `json:"init"`       // the kernel's, without what was not negotiated
	Block       bool           `json:"block,omitempty"`
	Helper      string         `json:"helper,omitempty"`
	NoOpen      bool           `json:"noOpen,omitempty"`
	// Asked is the source as the one who mounted named it, Base the volume or view
	// that this meant: names change their meaning, numbers don't.
	Asked string        `json:"asked,omitempty"`
	Base  meta.VolumeID `json:"base,omitempty"`
	// Connection is the kernel's number of it.
	Connection uint64 `json:"connection,omitempty"`
}

// OpenPredecessor reads what a holder had of a predecessor. Errors: Corrupt, Version, IO.
func OpenPredecessor(memory int) (*Predecessor, error) {
	m, err := keep.Left(memory)
	if err != nil {
		return nil, err
	}
	l := &Predecessor{Memory: m}
	if err := json.Unmarshal(m.Head(), &l.head); err != nil {
		m.Close()
		return nil, meta.E("read what a predecessor left", meta.Corrupt, "head", err)
	}
	if l.head.Session == 0 || len(l.head.Init) < inHeaderSize+16 {
		m.Close()
		return nil, meta.E("read what a predecessor left", meta.Corrupt, "head", errors.New("it is not whole"))
	}
	return l, nil
}

// Session and Generation are for the client that goes on: see penstock.Config.
func (l *Predecessor) Session() meta.SessionID { return l.head.Session }

// Generation is the successor's.
func (l *Predecessor) Generation() uint32 { return l.head.Generation + 1 }

// Flags of INIT, in 64 bits.
const (
	initExt   = 1 << 30
	hasResend = fuse.CAP_HAS_RESEND // FUSE_NOTIFY_RESEND: protocol 7.40, Linux 6.9
)

// remember keeps an INIT request with only those flags that the answer took, so
// that a successor, which may want more, comes to the same.
func (c *conn) remember(in, out []byte) {
	in = append([]byte(nil), in...)
	if len(out) < outHeaderSize+36 || order.Uint32(out[4:]) != 0 {
		return
	}
	out = out[outHeaderSize:]
	flags, flags2 := order.Uint32(out[12:]), order.Uint32(out[32:])
	order.PutUint32(in[inHeaderSize+12:], order.Uint32(in[inHeaderSize+12:])&(flags|initExt))
	if len(in) >= inHeaderSize+20 {
		order.PutUint32(in[inHeaderSize+16:], order.Uint32(in[inHeaderSize+16:])&flags2)
	}
	c.initial = in
	c.resends = (uint64(flags)|uint64(flags2)<<32)&hasResend != 0
}

// adopt goes on with a connection whose INIT a predecessor answered.
func (c *conn) adopt(init []byte) error {
	c.minor = order.Uint32(init[inHeaderSize+4:])
	c.fs.noEpoch = c.minor < minorEpoch
	out := make([]byte, smallOut)
	n, _ := c.ps.HandleRequest([][]byte{init}, [][]byte{out})
	if n < outHeaderSize || order.Uint32(out[4:]) != 0 {
		return meta.E("take over mount", meta.Protocol, "/dev/fuse", fmt.Errorf("INIT was refused: status %d", int32(order.Uint32(out[4:]))))
	}
	c.remember(init, out[:n])
	return nil
}

const notifyResend = 7

// resend has the kernel send again what was read and not answered.
func (c *conn) resend() { _ = c.notify(notifyResend, nil) }

// ---- what is open

// openRecords are the records of what is open, by handle, and of the owners that lock.
type openRecords struct {
	keep *keep.Memory // nil: nothing is kept

	mu      sync.Mutex
	opens   map[uint64]keep.Slot
	lockers map[lockerKey][]keep.Slot
	// by finds the handles that a predecessor made by the request that asked.
	by map[uint64]leftOpen
}

type lockerKey struct{ node, owner uint64 }

type leftOpen struct {
	node, fh uint64
	flags    uint32
}

func (k *openRecords) init(m *keep.Memory) {
	k.keep = m
	k.opens, k.lockers, k.by = make(map[uint64]keep.Slot), make(map[lockerKey][]keep.Slot), make(map[uint64]leftOpen)
}

// opened notes a handle, before the kernel is told of it.
func (k *openRecords) opened(node, fh uint64, flags uint32, backing int32, unique uint64) {
	if k.keep == nil {
		return
	}
	s := k.keep.Note(keep.Record{Kind: keep.Open, N: [6]uint64{node, fh, uint64(flags) | uint64(uint32(backing))<<32, unique &^ resent}})
	k.mu.Lock()
	k.opens[fh] = s
	k.mu.Unlock()
}

// known reports whether a handle is noted; without a memory all are.
func (k *openRecords) known(fh uint64) bool {
	if k.keep == nil {
		return true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	_, ok := k.opens[fh]
	return ok
}

// released forgets a handle.
func (k *openRecords) released(fh uint64) {
	if k.keep == nil {
		return
	}
	k.mu.Lock()
	s := k.opens[fh]
	delete(k.opens, fh)
	k.mu.Unlock()
	k.keep.Erase(s)
}

// locks notes that an owner locks through a handle; unlocks, that it is over.
func (k *openRecords) locks(node, owner, fh uint64) {
	if k.keep == nil {
		return
	}
	s := k.keep.Note(keep.Record{Kind: keep.Locker, N: [6]uint64{node, owner, fh}})
	k.mu.Lock()
	k.lockers[lockerKey{node, owner}] = append(k.lockers[lockerKey{node, owner}], s)
	k.mu.Unlock()
}

func (k *openRecords) unlocks(node, owner uint64) {
	if k.keep == nil {
		return
	}
	k.mu.Lock()
	l := k.lockers[lockerKey{node, owner}]
	delete(k.lockers, lockerKey{node, owner})
	k.mu.Unlock()
	k.keep.EraseAll(l)
}

// undoOpen takes back what a predecessor did for a request that opens a file, if
// it was not answered and comes again.
func (f *fileSystem) undoOpen(h *fuse.InHeader) {
	if h.Unique&resent == 0 || f.kept.keep == nil {
		return
	}
	f.kept.mu.Lock()
	o, ok := f.kept.by[h.Unique&^resent]
	delete(f.kept.by, h.Unique&^resent)
	f.kept.mu.Unlock()
	if !ok {
		return
	}
	v, ino, err := f.inode(request(nil), o.node)
	if err != nil {
		return
	}
	f.opens.with(o.node, false, func(n *openNode) { n.count(modeOf(o.fh), -1) })
	// The kernel's id of a backing file stays: another open may have joined it.
	v.Release(request(nil), ino, o.flags)
	f.kept.released(o.fh)
}

// reopener is a Volume whose files can be opened again without asking.
type reopener interface {
	Reopen(ino meta.Ino, flags uint32)
}

// maylock is a Volume that is told of whom it may have locks that it doesn't know.
type maylock interface {
	MayLock(ino meta.Ino, owner uint64)
}

var (
	_ reopener = (*penstock.Volume)(nil)
	_ maylock  = (*penstock.Volume)(nil)
)

// restore takes in what a predecessor had open.
func (f *fileSystem) restore(left []keep.Record) {
	var next uint64
	for _, r := range left {
		switch r.Kind {
		case keep.Open:
			node, fh, flags, backing := r.N[0], r.N[1], uint32(r.N[2]), int32(r.N[2]>>32)
			next = max(next, fh>>handleShift)
			v, ino, err := f.inode(request(nil), node)
			if err != nil {
				f.log.Warn("a file that was open is gone", "node", node, "err", err)
				continue
			}
			if o, ok := v.(reopener); ok {
				o.Reopen(ino, flags)
			}
			f.opens.with(node, true, func(n *openNode) {
				n.count(modeOf(fh), 1)
				if backing != 0 {
					n.backing = backing
				}
				// Nobody knows whether it is mapped.
				n.mapped = n.mapped || modeOf(fh)&modePassthrough == 0
			})
			f.kept.opened(node, fh, flags, backing, r.N[3])
			f.kept.by[r.N[3]] = leftOpen{node, fh, flags}
		case keep.Locker:
			f.noteLocker(r.N[0], r.N[2], r.N[1])
			v, ino, err := f.inode(request(nil), r.N[0])
			if l, ok := v.(maylock); ok && err == nil {
				l.MayLock(ino, r.N[1])
			}
		case keep.Page:
		}
	}
	// Beyond every number that may be on its way to the kernel.
	f.opens.next.Store(next + 1<<20)
}

// restorePages queues pages that a predecessor had taken from the kernel and not
// written. They are written in order, after what the library put back: what it
// held of the same bytes was older.
func (f *fileSystem) restorePages(left []keep.Record, bytes func(keep.Record) []byte) {
	for _, r := range left {
		if r.Kind != keep.Page {
			continue
		}
		v, ino, err := f.inode(request(nil), r.N[0])
		if err != nil {
			f.log.Warn("a file whose pages were being written is gone", "node", r.N[0], "err", err)
			continue
		}
		p := bytes(r)
		if p == nil {
			f.back.fail(r.N[0], meta.E("write back", meta.IO, "", errors.New("pages that a predecessor was given found no room")))
			continue
		}
		unique := r.N[5] &^ (1 << 63)
		f.addPage(r.N[0], pageWrite{
			v: v, ino: ino, data: append([]byte(nil), p...), off: int64(r.N[2]), epoch: v.Epoch(),
			call: &penstock.Call{
				Op:  meta.OpID{Incarnation: f.incarnation, Unique: unique},
				UID: r.Aux, GID: uint32(r.N[1]), Resent: true,
			},
		})
	}
}

// addPage queues a page, and notes it until it is written.
func (f *fileSystem) addPage(node uint64, p pageWrite) {
	if m := f.kept.keep; m != nil {
		buf := m.Buffer(len(p.data))
		if buf != nil {
			buf = append(buf, p.data...)
		}
		p.slot = m.Note(keep.Record{Kind: keep.Page, Aux: p.call.UID, N: [6]uint64{
			node, uint64(p.call.GID), uint64(p.off), uint64(len(p.data)), m.Place(buf), p.call.Op.Unique &^ resent,
		}})
		p.kept, p.keep = buf, m
	}
	f.back.add(node, p)
}

// leave gives the holder what a successor needs. connection 0: not known.
func (m *Mount) leave(k *Succession, generation uint32, connection uint64, block bool, source string) error {
	if connection == 0 {
		connection = kernel.ConnectionAt(m.dir)
	}
	h := head{
		Connection: connection,
		Dir:        m.dir, Source: source, Volume: m.fs.rootVolume, Root: m.fs.rootIno, Incarnation: m.fs.incarnation,
		Session: k.Session, Generation: generation, Init: m.fs.conn.initial, Block: block, Helper: m.helper, NoOpen: m.fs.noOpen,
		Asked: k.asked, Base: k.base,
	}
	b, err := json.Marshal(h)
	if err != nil {
		panic("fuse: a head is plain data: " + err.Error())
	}
	if err := k.Memory.SetHead(b); err != nil {
		return err
	}
	k.Memory.Whole()
	return k.Put(connection, m.fs.conn.fd, k.Memory.FD())
}
