package fuse

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"github.com/hanwen/go-fuse/v2/fuse"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/fuse/kernel"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/keep"
)

// How a mount outlives its process.
//
// A connection to the kernel lives as long as any process has its descriptor. So a holder
// (package fuse/hold) keeps the descriptor, and the memory in which the serving process
// records the state for a successor (package keep). The successor
//
//  1. waits until the predecessor is gone, and gets both descriptors;
//  2. continues the predecessor's session, puts back uncommitted changes (penstock.Dial),
//     opens the predecessor's open files again;
//  3. has its own protocol server read the predecessor's INIT, and discards the answer, since
//     the kernel already has an answer;
//  4. gives the holder a new memory with all of this state;
//  5. has the kernel send again the requests read but not answered by the predecessor
//     (FUSE_NOTIFY_RESEND), and serves.
//
// A successor killed before step 4 leaves the predecessor's memory unchanged, and another
// successor may try. The steps are the same whether the predecessor was killed or asked to go;
// when asked, the predecessor makes its bytes durable first, and exits.
//
// The predecessor may have executed a request that the kernel sends again. Operations of
// owners have numbers, so that an owner executes each operation once; a WRITE is repeated at
// the same place (penstock.Call.Resent); undoOpen reverts the counting of an OPEN.

// Succession describes how a mount takes over from a predecessor and leaves itself to a
// successor.
type Succession struct {
	Memory *keep.Memory // the client's
	// Put hands the device and the memory to the holder, with the kernel's number of the
	// connection. The caller keeps its own descriptors.
	Put func(connection uint64, device, memory int) error
	// Predecessor is the predecessor's memory, and Device the connection's descriptor,
	// duplicated for the mount; nil: no predecessor, and New mounts.
	Predecessor *Predecessor
	Device      int
	// Session is the client's session, and Count counts the requests in the session.
	Session meta.SessionID
	Count   interface {
		Begin() uint32
		End(turn uint32)
	}
	// Resumed is called once the predecessor's open files are open again.
	Resumed func()

	device *os.File // owns the descriptor Device
	asked  string   // as of head
	base   meta.VolumeID
}

// Predecessor is a memory left by the previous process, with its head.
type Predecessor struct {
	*keep.Memory
	head head
}

// head is the state shared by all generations of one mount.
type head struct {
	Dir         string         `json:"dir"`
	Source      string         `json:"source"`
	Volume      meta.VolumeID  `json:"volume"`
	Root        meta.Ino       `json:"root"`
	Incarnation uint64         `json:"incarnation"`
	Session     meta.SessionID `json:"session"`
	Generation  uint32         `json:"generation"` // of the process that wrote this head
	Init        []byte         `json:"init"`       // the kernel's INIT, with negotiated flags only
	Block       bool           `json:"block,omitempty"`
	Helper      string         `json:"helper,omitempty"`
	NoOpen      bool           `json:"noOpen,omitempty"`
	// Asked is the source as named by the mounting user, Base the number of the volume or view
	// named then: a name may change its meaning, a number never does.
	Asked string        `json:"asked,omitempty"`
	Base  meta.VolumeID `json:"base,omitempty"`
	// Connection is the kernel's number of the connection.
	Connection uint64 `json:"connection,omitempty"`
}

// OpenPredecessor reads a predecessor's memory, received from a holder. Errors: Corrupt,
// Version, IO.
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

// Session is the session that the successor's client continues; see penstock.Config.
func (l *Predecessor) Session() meta.SessionID { return l.head.Session }

// Generation is the successor's.
func (l *Predecessor) Generation() uint32 { return l.head.Generation + 1 }

// Flags of INIT, in 64 bits.
const (
	initExt   = 1 << 30
	hasResend = fuse.CAP_HAS_RESEND // FUSE_NOTIFY_RESEND: protocol 7.40, Linux 6.9
)

// remember stores an INIT request with only the flags accepted in the answer, so that a
// successor supporting more flags negotiates the same result.
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

// adopt continues a connection whose INIT a predecessor answered.
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

// resend has the kernel send every read but unanswered request again.
func (c *conn) resend() { _ = c.notify(notifyResend, nil) }

// ---- open files

// openRecords are the records of open files, by handle, and of lock owners.
type openRecords struct {
	keep *keep.Memory // nil: nothing is kept

	mu      sync.Mutex
	opens   map[uint64]keep.Slot
	lockers map[lockerKey][]lockerSlot
	// by maps the number of an opening request to the predecessor's handle.
	by map[uint64]leftOpen
}

type lockerKey struct{ node, owner uint64 }

// lockerSlot is the record that an owner locks through a handle.
type lockerSlot struct {
	fh uint64
	at keep.Slot
}

type leftOpen struct {
	node, fh uint64
	flags    uint32
}

func (k *openRecords) init(m *keep.Memory) {
	k.keep = m
	k.opens, k.lockers, k.by = make(map[uint64]keep.Slot), make(map[lockerKey][]lockerSlot), make(map[uint64]leftOpen)
}

// opened records a handle, before the kernel learns the handle.
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

// locks records that an owner locks through a handle; unlocks erases the owner's records.
func (k *openRecords) locks(node, owner, fh uint64) {
	if k.keep == nil {
		return
	}
	s := k.keep.Note(keep.Record{Kind: keep.Locker, N: [6]uint64{node, owner, fh}})
	k.mu.Lock()
	k.lockers[lockerKey{node, owner}] = append(k.lockers[lockerKey{node, owner}], lockerSlot{fh, s})
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
	for _, s := range l {
		k.keep.Erase(s.at)
	}
}

// unlocksThrough erases the record that an owner locks through a handle.
func (k *openRecords) unlocksThrough(node, owner, fh uint64) {
	if k.keep == nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	key := lockerKey{node, owner}
	k.lockers[key] = slices.DeleteFunc(k.lockers[key], func(s lockerSlot) bool {
		if s.fh == fh {
			k.keep.Erase(s.at)
		}
		return s.fh == fh
	})
}

// undoOpen reverts a predecessor's open if the kernel sends the unanswered request again.
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
	// The kernel's id of a backing file stays, since another open may share the id.
	v.Release(request(nil), ino, o.flags)
	f.kept.released(o.fh)
}

// reopener is a Volume that can open a file again without asking the owner.
type reopener interface {
	Reopen(ino meta.Ino, flags uint32)
}

// maylock is a Volume that records owners with possible locks unknown to the volume.
type maylock interface {
	MayLock(ino meta.Ino, owner uint64)
}

var (
	_ reopener = (*penstock.Volume)(nil)
	_ maylock  = (*penstock.Volume)(nil)
)

// restore opens the predecessor's open files again and notes the predecessor's lock owners.
func (f *fileSystem) restore(left []keep.Record) {
	var next uint64
	for _, r := range left {
		switch r.Kind {
		case keep.Open:
			node, fh, flags, backing := r.N[0], r.N[1], uint32(r.N[2]), int32(r.N[2]>>32)
			next = max(next, fh>>handleShift)
			v, ino, err := f.inode(request(nil), node)
			if err != nil {
				f.log.Warn("an open file can't be taken over: its volume does not have the file", "node", node, "err", err)
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
				// A mapping may exist; no record says so.
				n.mapped = n.mapped || modeOf(fh)&modePassthrough == 0
			})
			f.kept.opened(node, fh, flags, backing, r.N[3])
			f.kept.by[r.N[3]] = leftOpen{node, fh, flags}
		case keep.Locker:
			f.opens.noteLocker(&f.kept, r.N[0], r.N[2], r.N[1])
			v, ino, err := f.inode(request(nil), r.N[0])
			if l, ok := v.(maylock); ok && err == nil {
				l.MayLock(ino, r.N[1])
			}
		case keep.Tail:
			next = max(next, f.streams.restore(&r)>>handleShift)
		case keep.Input:
			next = max(next, r.N[1]>>handleShift) // see restoreInputs
		case keep.Page, keep.Line:
		}
	}
	// Above every number possibly on its way to the kernel.
	f.opens.next.Store(next + 1<<20)
}

// restorePages queues pages that the predecessor took from the kernel and did not write. The
// pages are written in order, after the library's own changes were put back: the library's
// bytes of the same range are older.
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

// addPage queues a page and records the page until written.
func (pg *pages) addPage(node uint64, p pageWrite) {
	if m := pg.kept.keep; m != nil {
		buf := m.Buffer(len(p.data))
		if buf != nil {
			buf = append(buf, p.data...)
		}
		p.slot = m.Note(keep.Record{Kind: keep.Page, Aux: p.call.UID, N: [6]uint64{
			node, uint64(p.call.GID), uint64(p.off), uint64(len(p.data)), m.Place(buf), p.call.Op.Unique &^ resent,
		}})
		p.kept, p.keep = buf, m
	}
	pg.back.add(node, p)
}

// leave gives the holder the state for a successor. connection 0: unknown, and leave looks it
// up.
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
