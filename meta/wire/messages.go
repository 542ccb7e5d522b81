package wire

import (
	"fmt"

	"penstock.io/penstock/meta"
)

// Role says who dials.
type Role uint8

const (
	RoleClient Role = 1 + iota
	RoleChunkServer
	RoleAdmin
	// RoleEnrol: a chunk server that wants its number; it may not wait for
	// volumes that may wait for it.
	RoleEnrol
)

// Message is the body of a frame.
type Message interface {
	frameType() Type
	fields(*coder)
}

// Append adds m as one frame to dst.
func Append(dst []byte, id uint64, m Message) []byte {
	b, start := Begin(dst, m.frameType(), id)
	c := coder{buf: b}
	m.fields(&c)
	return End(c.buf, start)
}

// Decode reads a body into m. Errors: Protocol.
func Decode(body []byte, m Message) error {
	c := coder{buf: body, dec: true}
	m.fields(&c)
	if c.err == nil && len(c.buf) > 0 {
		c.err = fmt.Errorf("%d bytes too many", len(c.buf))
	}
	if c.err != nil {
		return meta.E("decode frame", meta.Protocol, fmt.Sprintf("type %d", m.frameType()), c.err)
	}
	return nil
}

// Hello opens a connection. The dialer sends it first; the server answers
// with its own: Session, TTL, and whether the session was known (Resumed).
type Hello struct {
	Min, Max uint32 // protocol versions
	Role     Role
	Session  meta.SessionID // zero: a new one, please
	Name     string         // for people
	Host     string         // boot id
	PID      uint32
	Start    uint64 // process start, clock ticks since boot
	Cluster  string // the server's answer; a dialer that knows it sends it, too
	TTL      uint64 // lease, milliseconds (answer)
	Resumed  bool   // the session goes on with its leases (answer)
	Err      meta.Kind
	Detail   string
}

func (*Hello) frameType() Type { return THello }
func (m *Hello) fields(c *coder) {
	c.u32(&m.Min)
	c.u32(&m.Max)
	c.u8((*uint8)(&m.Role))
	c.session(&m.Session)
	c.str(&m.Name)
	c.str(&m.Host)
	c.u32(&m.PID)
	c.u64(&m.Start)
	c.str(&m.Cluster)
	c.u64(&m.TTL)
	c.bool(&m.Resumed)
	c.kind(&m.Err)
	c.str(&m.Detail)
}

// Call asks for one operation.
type Call struct {
	Volume meta.VolumeID
	ID     meta.OpID // zero for reads
	Want   meta.LeaseMode
	// Ack: every reply up to this journal entry was received and is known to
	// be durable; the owner may forget them.
	Ack    meta.Seq
	Replay bool // sent before, on an earlier connection
	Op     meta.Op
}

func (*Call) frameType() Type { return TCall }
func (m *Call) fields(c *coder) {
	c.volume(&m.Volume)
	c.opID(&m.ID)
	c.mode(&m.Want)
	c.seq(&m.Ack)
	c.bool(&m.Replay)
	c.op(&m.Op)
}

// Status is how an operation ended.
type Status struct {
	Err     meta.Kind
	Op      string // with Err: meta.Error's words
	Subject string
	Detail  string
}

func (s *Status) fields(c *coder) {
	c.kind(&s.Err)
	if s.Err != meta.KindOK {
		c.str(&s.Op)
		c.str(&s.Subject)
		c.str(&s.Detail)
	}
}

// StatusOf translates an error for the wire.
func StatusOf(err error) Status {
	if err == nil {
		return Status{}
	}
	s := Status{Err: meta.KindOf(err)}
	if e, ok := err.(*meta.Error); ok {
		s.Op, s.Subject = e.Op, e.Subject
		if e.Err != nil {
			s.Detail = e.Err.Error()
		}
	} else {
		s.Detail = err.Error()
	}
	return s
}

// Error translates back; nil when the operation succeeded.
func (s *Status) Error() error {
	if s.Err == meta.KindOK {
		return nil
	}
	var cause error
	if s.Detail != "" {
		cause = remoteError(s.Detail)
	}
	return &meta.Error{Op: s.Op, Kind: s.Err, Subject: s.Subject, Err: cause}
}

type remoteError string

func (e remoteError) Error() string { return string(e) }

// Reply answers a Call or a Seal.
type Reply struct {
	Status Status
	Seq    meta.Seq // the journal entry that will hold the operation; zero for reads
	Grants []meta.Grant
	Result meta.Result
}

func (*Reply) frameType() Type { return TReply }
func (m *Reply) fields(c *coder) {
	m.Status.fields(c)
	c.seq(&m.Seq)
	list(c, &m.Grants, grant)
	c.result(&m.Result)
}

// Batch asks for several operations of one volume, executed in order, each
// whether or not the one before succeeded.
type Batch struct{ Calls []Call }

func (*Batch) frameType() Type { return TBatch }
func (m *Batch) fields(c *coder) {
	list(c, &m.Calls, func(c *coder, x *Call) { x.fields(c) })
}

// BatchRe answers a Batch.
type BatchRe struct{ Replies []Reply }

func (*BatchRe) frameType() Type { return TBatchRe }
func (m *BatchRe) fields(c *coder) {
	list(c, &m.Replies, func(c *coder, x *Reply) { x.fields(c) })
}

// SyncAll as Sync.Seq stands for everything that was answered on the session:
// a change of owner gave what was sent again other numbers.
const SyncAll = meta.Seq(1<<64 - 1)

// Sync asks that the journal reach Seq soon; the answer is TReply, sent after
// the TDurable that covers it.
type Sync struct {
	Volume meta.VolumeID
	Seq    meta.Seq
}

func (*Sync) frameType() Type   { return TSync }
func (m *Sync) fields(c *coder) { c.volume(&m.Volume); c.seq(&m.Seq) }

// Durable tells a session that its operations up to Seq are in the journal.
type Durable struct {
	Volume meta.VolumeID
	Seq    meta.Seq
}

func (*Durable) frameType() Type   { return TDurable }
func (m *Durable) fields(c *coder) { c.volume(&m.Volume); c.seq(&m.Seq) }

// Recall asks a session to lower a lease; Recalled answers with the same id.
// Orphan: the inode has lost its last name; the session is one of its holders
// until it sends ReleaseOrphans.
type Recall struct {
	Recall meta.Recall
	Orphan bool
}

func (*Recall) frameType() Type { return TRecall }
func (m *Recall) fields(c *coder) {
	c.volume(&m.Recall.Volume)
	ino(c, &m.Recall.Ino)
	c.mode(&m.Recall.Keep)
	c.bool(&m.Orphan)
}

// Recalled answers a Recall: what was cached beyond Keep is gone.
type Recalled struct {
	Volume meta.VolumeID
	Ino    meta.Ino
}

func (*Recalled) frameType() Type   { return TRecalled }
func (m *Recalled) fields(c *coder) { c.volume(&m.Volume); ino(c, &m.Ino) }

// Drop gives leases back unasked.
type Drop struct {
	Volume meta.VolumeID
	Inos   []meta.Ino
}

func (*Drop) frameType() Type   { return TDrop }
func (m *Drop) fields(c *coder) { c.volume(&m.Volume); list(c, &m.Inos, ino) }

// KeepAlive renews the session's lease; the server echoes it.
type KeepAlive struct{ Count uint64 }

func (*KeepAlive) frameType() Type   { return TKeepAlive }
func (m *KeepAlive) fields(c *coder) { c.u64(&m.Count) }

// Alloc asks for open chunks.
type Alloc struct {
	Volume meta.VolumeID
	ID     meta.OpID
	N      uint32
	Own    bool
}

func (*Alloc) frameType() Type   { return TAlloc }
func (m *Alloc) fields(c *coder) { c.volume(&m.Volume); c.opID(&m.ID); c.u32(&m.N); c.bool(&m.Own) }

// Grants answers Alloc.
type Grants struct {
	Status Status
	Grants []meta.ChunkGrant
}

func (*Grants) frameType() Type   { return TGrants }
func (m *Grants) fields(c *coder) { m.Status.fields(c); list(c, &m.Grants, chunkGrant) }

// Seal asks to end a chunk; Reply.Result.Chunks has its record.
type Seal struct{ Chunk meta.ChunkID }

func (*Seal) frameType() Type   { return TSeal }
func (m *Seal) fields(c *coder) { c.chunkID(&m.Chunk) }

// Lock sets a lock (Wait: until it is granted), or with Test asks who holds a
// conflicting one.
type Lock struct {
	Volume meta.VolumeID
	Lock   meta.Lock
	Wait   bool
	Test   bool
	// DropOwner releases every lock of Lock.Owner on Lock.Ino (close).
	DropOwner bool
}

func (*Lock) frameType() Type { return TLock }
func (m *Lock) fields(c *coder) {
	c.volume(&m.Volume)
	lock(c, &m.Lock)
	c.bool(&m.Wait)
	c.bool(&m.Test)
	c.bool(&m.DropOwner)
}

// LockRe answers Lock. With Test, Conflict.Type is LockUnlock when there is none.
type LockRe struct {
	Status   Status
	Conflict meta.Lock
}

func (*LockRe) frameType() Type   { return TLockRe }
func (m *LockRe) fields(c *coder) { m.Status.fields(c); lock(c, &m.Conflict) }

// Cancel stops a waiting request; it is answered Canceled or Interrupted.
type Cancel struct{ Request uint64 }

func (*Cancel) frameType() Type   { return TCancel }
func (m *Cancel) fields(c *coder) { c.u64(&m.Request) }

// AdminOp numbers administrative requests.
type AdminOp uint8

const (
	AdminVolumes AdminOp = 1 + iota
	AdminCreateVolume
	AdminDeleteVolume
	AdminSetPolicy
	AdminAttach
	AdminDetach
	AdminStatus
	AdminCheckpoint
	AdminFsck
	AdminVolumeByName
	// AdminEnrol gives a chunk server its number: Ino is the one it has, or
	// zero. Report is JSON: cluster, server.
	AdminEnrol
)

// Admin is an administrative request.
type Admin struct {
	Op     AdminOp
	Name   string
	Volume meta.VolumeID
	Parent meta.VolumeID // attach: the volume and directory to hang it in
	Ino    meta.Ino
	Entry  string // attach: the name there; rename: the new name
	Mode   uint32 // create: of the root directory
	UID    uint32
	GID    uint32
	Policy meta.Policy
}

func (*Admin) frameType() Type { return TAdmin }
func (m *Admin) fields(c *coder) {
	c.u8((*uint8)(&m.Op))
	c.str(&m.Name)
	c.volume(&m.Volume)
	c.volume(&m.Parent)
	ino(c, &m.Ino)
	c.str(&m.Entry)
	c.u32(&m.Mode)
	c.u32(&m.UID)
	c.u32(&m.GID)
	c.policy(&m.Policy)
}

// VolumeInfo is what administrators see of a volume.
type VolumeInfo struct {
	ID       meta.VolumeID
	Name     string
	Path     string // where it is attached, "" when it stands alone
	Policy   meta.Policy
	Deleting bool
	Usage    meta.StatFS
}

// AdminRe answers Admin.
type AdminRe struct {
	Status  Status
	Volumes []VolumeInfo
	Servers []meta.ServerInfo
	Report  []byte // JSON: status, fsck
}

func (*AdminRe) frameType() Type { return TAdminRe }
func (m *AdminRe) fields(c *coder) {
	m.Status.fields(c)
	list(c, &m.Volumes, func(c *coder, v *VolumeInfo) {
		c.volume(&v.ID)
		c.str(&v.Name)
		c.str(&v.Path)
		c.policy(&v.Policy)
		c.bool(&v.Deleting)
		s := &v.Usage
		for _, x := range []*uint64{&s.UsedBytes, &s.UsedInodes, &s.QuotaBytes, &s.QuotaInode, &s.DiskTotal, &s.DiskFree} {
			c.u64(x)
		}
	})
	list(c, &m.Servers, serverInfo)
	c.bytes(&m.Report)
}

// Report is a chunk server's word of itself, every few seconds.
type Report struct {
	Info   meta.ServerInfo
	Failed []string // disks that failed
}

func (*Report) frameType() Type { return TReport }
func (m *Report) fields(c *coder) {
	serverInfo(c, &m.Info)
	list(c, &m.Failed, func(c *coder, s *string) { c.str(s) })
}

// Order is pushed on a chunk server's stream; OrderRe has the same id.
type Order struct{ Order meta.Order }

func (*Order) frameType() Type { return TOrder }
func (m *Order) fields(c *coder) {
	o := &m.Order
	c.u8((*uint8)(&o.Kind))
	c.chunkID(&o.Chunk)
	c.fence(&o.Fence)
	c.bool(&o.Final)
	c.u64(&o.Length)
	list(c, &o.Keys, func(c *coder, k *meta.CapKey) { c.u32(&k.ID); c.bytes(&k.Secret) })
	c.chunkID(&o.From)
	list(c, &o.Ranges, func(c *coder, r *meta.CopyRun) { c.u64(&r.Off); c.u64(&r.Len) })
}

// OrderRe answers an Order.
type OrderRe struct{ Result meta.OrderResult }

func (*OrderRe) frameType() Type { return TOrderRe }
func (m *OrderRe) fields(c *coder) {
	r := &m.Result
	c.kind(&r.Err)
	c.str(&r.Detail)
	c.chunkState(&r.State)
	c.u64(&r.Length)
	c.u64(&r.Synced)
	c.u32(&r.CRC)
	c.fence(&r.Fence)
	c.bool(&r.Existing)
}

// Claim is sent after a change of owner, before anything else: what the
// session held on a volume.
type Claim struct {
	Volume meta.VolumeID
	Leases []meta.Grant
	Locks  []meta.Lock
}

func (*Claim) frameType() Type { return TClaim }
func (m *Claim) fields(c *coder) {
	c.volume(&m.Volume)
	list(c, &m.Leases, grant)
	list(c, &m.Locks, lock)
}

// Bye ends the session in order.
type Bye struct{}

func (*Bye) frameType() Type { return TBye }
func (*Bye) fields(*coder)   {}

// Caps asks for a capability to read the volume's chunks.
type Caps struct{ Volume meta.VolumeID }

func (*Caps) frameType() Type   { return TCaps }
func (m *Caps) fields(c *coder) { c.volume(&m.Volume) }

// CapsRe answers Caps.
type CapsRe struct {
	Status Status
	Cap    []byte
	TTL    uint64 // milliseconds
}

func (*CapsRe) frameType() Type   { return TCapsRe }
func (m *CapsRe) fields(c *coder) { m.Status.fields(c); c.bytes(&m.Cap); c.u64(&m.TTL) }

// Servers tells sessions where chunk servers are.
type Servers struct{ Servers []meta.ServerInfo }

func (*Servers) frameType() Type   { return TServers }
func (m *Servers) fields(c *coder) { list(c, &m.Servers, serverInfo) }
