package wire

import (
	"errors"
	"fmt"
	"time"

	"penstock.io/penstock/meta"
)

// Role is the role of the dialer.
type Role uint8

const (
	RoleClient Role = 1 + iota
	RoleChunkServer
	RoleAdmin
	// RoleEnrol: a process that joins the cluster, and has no certificate yet.
	RoleEnrol
	// RolePeer: another meta server. A peer sends only administrative requests and has no
	// session.
	RolePeer
)

// Message is the body of a frame.
type Message interface {
	frameType() Type
	fields(*coder)
}

// Encode appends m to dst as a frame of protocol version v. Errors: ResourceExceeded (the
// frame would be longer than MaxFrame); Encode then returns dst unchanged.
func Encode(dst []byte, v uint8, id uint64, m Message) ([]byte, error) {
	b, start := Begin(dst, v, m.frameType(), id)
	c := coder{buf: b}
	m.fields(&c)
	if c.err != nil {
		return dst, c.err
	}
	frame, err := End(c.buf, start)
	if err != nil {
		return dst, err
	}
	return frame, nil
}

// Append is Encode for messages of bounded length: hellos, and short answers.
func Append(dst []byte, v uint8, id uint64, m Message) []byte {
	b, err := Encode(dst, v, id, m)
	if err != nil {
		panic("wire: " + err.Error())
	}
	return b
}

// Decode reads a body into m. Errors: Protocol.
func Decode(body Body, m Message) error {
	c := coder{buf: body.Bytes, dec: true}
	m.fields(&c)
	if c.err == nil && len(c.buf) > 0 {
		c.err = fmt.Errorf("%d bytes too many", len(c.buf))
	}
	if c.err != nil {
		return meta.E("decode frame", meta.Protocol, fmt.Sprintf("type %d", m.frameType()), c.err)
	}
	return nil
}

// Hello opens a connection. The dialer sends Hello first; the server answers with its own
// Hello: Session, TTL, and whether the server knew the session (Resumed).
type Hello struct {
	Min, Max uint32 // protocol versions
	Role     Role
	Session  meta.SessionID // zero asks for a new session
	Name     string         // for people
	Host     string         // boot id; in the answer, the address that the server announces to others
	PID      uint32
	Start    uint64 // process start, clock ticks since boot
	Cluster  string // in the answer; a dialer that knows the cluster sends the id, too
	// TTL is, in the answer, the lease in milliseconds. In the dialer's Hello, TTL is the time
	// in milliseconds after the last renewal during which another process may continue the
	// session: until then the server ends the session only when other sessions wait for its
	// leases or locks. With zero, or with a server that ignores the dialer's TTL, the session
	// ends with its lease.
	TTL uint64
	// Resumed, from the dialer: another process continues the session. The process does not
	// know the session's leases, so the server must repeat the grants with each reply. In the
	// answer: the server will do so (a server that can't does not set Resumed).
	Resumed bool
	// Streams, from the dialer: the client serves streams, and changes their files
	// (meta.FlagStream).
	Streams bool
	Err     meta.Kind
	Detail  string
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
	c.bool(&m.Streams)
	c.kind(&m.Err)
	c.str(&m.Detail)
}

// Call asks for an operation.
type Call struct {
	Volume meta.VolumeID
	ID     meta.OpID // zero for reads
	Want   meta.LeaseMode
	// Ack: the session received every reply up to this journal entry and knows the entries to
	// be durable; the owner may drop the stored replies.
	Ack    meta.Seq
	Replay bool // sent before, on an earlier connection
	// At is the snapshot to read; zero is the live volume. The read of a snapshot gets no
	// lease: a snapshot does not change.
	At meta.Generation
	// Reserved is the number of promised bytes (Reserve) set aside for this operation. When
	// the operation succeeds, the session no longer holds the promise of these bytes, used or
	// not. Draw: the operation takes the bytes that it needs, and a later operation on the
	// same inode ends the promise.
	Reserved uint64
	Draw     bool
	Op       meta.Op
}

func (*Call) frameType() Type { return TCall }
func (m *Call) fields(c *coder) {
	c.volume(&m.Volume)
	c.opID(&m.ID)
	c.mode(&m.Want)
	c.seq(&m.Ack)
	const replay, at, reserved, draw = 1, 2, 4, 8
	var flags uint8
	if m.Replay {
		flags |= replay
	}
	if m.At != 0 {
		flags |= at
	}
	if m.Reserved != 0 {
		flags |= reserved
	}
	if m.Draw {
		flags |= draw
	}
	c.u8(&flags)
	if flags > replay|at|reserved|draw {
		c.fail(errors.New("a call has unknown flags"))
	}
	if c.dec {
		m.Replay, m.Draw = flags&replay != 0, flags&draw != 0
	}
	if flags&at != 0 {
		c.u32((*uint32)(&m.At))
		if m.At == 0 {
			c.fail(errors.New("a call names no snapshot"))
		}
	}
	if flags&reserved != 0 {
		c.u64(&m.Reserved)
		if m.Reserved == 0 {
			c.fail(errors.New("a call ends no promise"))
		}
	}
	c.op(&m.Op)
}

// Status is the outcome of an operation.
type Status struct {
	Err     meta.Kind
	Op      string // if Err is set: Op and Subject of meta.Error
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
	for { // a list with a single error becomes the error
		l, ok := err.(interface{ Unwrap() []error })
		if !ok || len(l.Unwrap()) != 1 {
			break
		}
		err = l.Unwrap()[0]
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

// Error translates back to an error; nil if the operation succeeded.
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
	Seq    meta.Seq // journal entry of the operation; zero for reads
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

// Batch asks for several operations of one volume, executed in order. An operation runs also
// if the operation before failed.
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

// SyncAll as Sync.Seq means every operation answered on the session. A session uses SyncAll
// after a change of owner: the replayed operations have other numbers at the new owner.
const SyncAll = meta.Seq(1<<64 - 1)

// Sync asks the owner to bring the journal to Seq soon. The owner answers with TReply, sent
// after the TDurable covering Seq.
type Sync struct {
	Volume meta.VolumeID
	Seq    meta.Seq
}

func (*Sync) frameType() Type   { return TSync }
func (m *Sync) fields(c *coder) { c.volume(&m.Volume); c.seq(&m.Seq) }

// Durable notifies a session: the journal holds the session's operations up to Seq.
type Durable struct {
	Volume meta.VolumeID
	Seq    meta.Seq
}

func (*Durable) frameType() Type   { return TDurable }
func (m *Durable) fields(c *coder) { c.volume(&m.Volume); c.seq(&m.Seq) }

// Recall asks a session to lower a lease; Recalled answers with the same id. Orphan: the inode
// has lost its last name; the session is one of the inode's holders until the session sends
// ReleaseOrphans.
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
	ms := uint32(m.Recall.Within / time.Millisecond)
	c.u32(&ms)
	if c.dec {
		m.Recall.Within = time.Duration(ms) * time.Millisecond
	}
}

// Recalled answers a Recall: the session dropped its cache beyond Keep. Held: the session
// dropped nothing, since it could not commit its buffered bytes within the time.
type Recalled struct {
	Volume meta.VolumeID
	Ino    meta.Ino
	Held   bool
}

func (*Recalled) frameType() Type { return TRecalled }
func (m *Recalled) fields(c *coder) {
	c.volume(&m.Volume)
	ino(c, &m.Ino)
	c.bool(&m.Held)
}

// Drop gives leases back without a recall.
type Drop struct {
	Volume meta.VolumeID
	Inos   []meta.Ino
}

func (*Drop) frameType() Type   { return TDrop }
func (m *Drop) fields(c *coder) { c.volume(&m.Volume); list(c, &m.Inos, ino) }

// KeepAlive renews the session's lease with this server. The server echoes the frame with the
// lease duration, counted from the client's sending time. A server that may not answer for a
// volume entered by the session does not echo.
type KeepAlive struct {
	Count uint64
	TTL   uint64 // milliseconds (echo)
}

func (*KeepAlive) frameType() Type { return TKeepAlive }
func (m *KeepAlive) fields(c *coder) {
	c.u64(&m.Count)
	c.u64(&m.TTL)
}

// Enter begins or continues a session's use of a volume. On each connection the session sends
// Enter before any other message of the volume.
type Enter struct {
	Volume meta.VolumeID
	Known  bool // the session entered before, at this owner or an earlier owner
}

func (*Enter) frameType() Type   { return TEnter }
func (m *Enter) fields(c *coder) { c.volume(&m.Volume); c.bool(&m.Known) }

// Entered answers Enter. With the kind NotOwner the status has the owner's address, if known,
// in its subject.
type Entered struct {
	Status Status
	// Known: the session's state in the volume is still valid. If Known is false and the
	// client sent true, the state is void and the session begins anew in the volume.
	Known bool
	// Claim: the owner does not know the session's leases and locks; the client sends its
	// claims.
	Claim bool
	// Metered: the volume has a quota of bytes, so the session must reserve bytes before
	// writing.
	Metered bool
	// Overwrites: the session must also reserve overwritten bytes, since snapshots count.
	Overwrites bool
	// Policy is the volume's policy.
	Policy meta.Policy
}

func (*Entered) frameType() Type { return TEntered }
func (m *Entered) fields(c *coder) {
	m.Status.fields(c)
	c.bool(&m.Known)
	c.bool(&m.Claim)
	c.bool(&m.Metered)
	c.bool(&m.Overwrites)
	c.policy(&m.Policy)
}

// Back notifies the owner that the session has sent its claims and replays of a volume: the
// owner need not wait for this session any longer.
type Back struct{ Volume meta.VolumeID }

func (*Back) frameType() Type   { return TBack }
func (m *Back) fields(c *coder) { c.volume(&m.Volume) }

// Moved notifies a session that this server no longer serves a volume. The session sends
// unanswered requests to the next owner. Addr is the probable address of the next owner, or
// empty.
type Moved struct {
	Volume meta.VolumeID
	Addr   string
}

func (*Moved) frameType() Type   { return TMoved }
func (m *Moved) fields(c *coder) { c.volume(&m.Volume); c.str(&m.Addr) }

// MetaServer is a live meta server.
type MetaServer struct {
	Name string
	Addr string
}

// Metas announces the meta servers to sessions and chunk servers.
type Metas struct{ Servers []MetaServer }

func (*Metas) frameType() Type { return TMetas }
func (m *Metas) fields(c *coder) {
	list(c, &m.Servers, func(c *coder, x *MetaServer) { c.str(&x.Name); c.str(&x.Addr) })
}

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

// Seal asks the owner to seal a chunk; Reply.Result.Chunks has the chunk's record. Asked: the
// request comes from the chunk's writer, which has stopped and writes the bytes beyond Need
// again elsewhere.
type Seal struct {
	Chunk meta.ChunkID
	Asked bool
	Need  uint64
}

func (*Seal) frameType() Type   { return TSeal }
func (m *Seal) fields(c *coder) { c.chunkID(&m.Chunk); c.bool(&m.Asked); c.u64(&m.Need) }

// Trouble reports chunk servers and replicas that failed a client. For a while the owner
// allocates no chunks of this client on the unreachable servers in Away (a Trouble sent before
// an Alloc applies to that Alloc). The owner checks the replicas in Bad, which failed
// verification.
type Trouble struct {
	Volume meta.VolumeID
	Away   []meta.ServerID
	Bad    []BadReplica
}

// BadReplica is a replica that failed verification at a reader.
type BadReplica struct {
	Chunk  meta.ChunkID
	Server meta.ServerID
}

func (*Trouble) frameType() Type { return TTrouble }
func (m *Trouble) fields(c *coder) {
	c.volume(&m.Volume)
	list(c, &m.Away, server)
	list(c, &m.Bad, func(c *coder, b *BadReplica) { c.chunkID(&b.Chunk); server(c, &b.Server) })
}

// GaveUp reports to the owner the files and bytes that a client had accepted for writing, not
// made durable, and discarded at an operator's request.
type GaveUp struct {
	Volume meta.VolumeID
	Files  uint64
	Bytes  uint64
}

func (*GaveUp) frameType() Type { return TGaveUp }
func (m *GaveUp) fields(c *coder) {
	c.volume(&m.Volume)
	c.u64(&m.Files)
	c.u64(&m.Bytes)
}

// Lock sets a lock; with Wait the answer comes when the lock is granted. With Test, Lock asks
// for a conflicting lock instead.
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

// LockRe answers Lock. With Test, Conflict.Type is LockUnlock if no lock conflicts.
type LockRe struct {
	Status   Status
	Conflict meta.Lock
}

func (*LockRe) frameType() Type   { return TLockRe }
func (m *LockRe) fields(c *coder) { m.Status.fields(c); lock(c, &m.Conflict) }

// Cancel stops a waiting request; the owner answers the request with Canceled or Interrupted.
type Cancel struct{ Request uint64 }

func (*Cancel) frameType() Type   { return TCancel }
func (m *Cancel) fields(c *coder) { c.u64(&m.Request) }

// AdminOp numbers administrative requests.
type AdminOp uint8

const (
	// AdminVolumeByName tells a session of the volume that it is to use: Volume or, without a
	// number, the volume Name.
	AdminVolumeByName AdminOp = 1 + iota
	// AdminHandOver asks the owner of Volume to hand the volume over to the server at Entry.
	AdminHandOver
	// AdminJoin comes from a process with a token, without a certificate. Body, Report:
	// JoinRequest, JoinAnswer.
	AdminJoin
	// AdminPathOf returns the names from Volume's root to the directory Ino. Report: a JSON
	// list.
	AdminPathOf
	// AdminTake asks the receiving server to take Volume from the owner at Entry: the server
	// prepares, then asks the owner to hand the volume over. Name is the owner's name if the
	// owner is stopping.
	AdminTake
	AdminViews          // the snapshots of Volume that can be shown; Report: ViewsAnswer
	AdminTakeTarget     // from the session filling the mirror's target Volume; Entry: the snapshot; Body: Once
	AdminRollBackTarget // as AdminTakeTarget, back to the snapshot Entry
	// AdminShowTarget makes Volume a mirror's target and shows its readers the snapshot Entry.
	// With "" Volume becomes an ordinary volume again. It is for the session with the right to
	// fill Volume.
	AdminShowTarget
	// AdminCloneSettle asks the owner of Volume to compare its notes of clones with the table
	// of volumes.
	AdminCloneSettle
	// AdminChunkPlaces asks Volume's owner for the places of chunks. Body: a list of ids in
	// hex. Report: a list of ChunkWhere. With Entry "seal" the owner seals open chunks.
	AdminChunkPlaces
	lastAdminOp
)

// AdminOps is larger than the number of every administrative request.
const AdminOps = int(lastAdminOp)

// Admin is an administrative request.
type Admin struct {
	Op     AdminOp
	Name   string
	Volume meta.VolumeID
	Ino    meta.Ino
	Entry  string
	Body   []byte // further content, by Op
}

func (*Admin) frameType() Type { return TAdmin }
func (m *Admin) fields(c *coder) {
	c.u8((*uint8)(&m.Op))
	c.str(&m.Name)
	c.volume(&m.Volume)
	ino(c, &m.Ino)
	c.str(&m.Entry)
	c.bytes(&m.Body)
}

// VolumeInfo describes a volume to a session that is to use the volume.
type VolumeInfo struct {
	ID       meta.VolumeID
	Name     string
	Policy   meta.Policy
	Deleting bool // or being created, or in the trash
}

// AdminRe answers Admin.
type AdminRe struct {
	Status  Status
	Volumes []VolumeInfo
	Report  []byte // JSON
}

func (*AdminRe) frameType() Type { return TAdminRe }
func (m *AdminRe) fields(c *coder) {
	m.Status.fields(c)
	list(c, &m.Volumes, func(c *coder, v *VolumeInfo) {
		c.volume(&v.ID)
		c.str(&v.Name)
		c.policy(&v.Policy)
		c.bool(&v.Deleting)
	})
	c.bytes(&m.Report)
}

// Report is a chunk server's report, sent every few seconds.
type Report struct {
	Info meta.ServerInfo
	// Generation is a new random number whenever an earlier listing (OrderList) may be wrong
	// without an event about the difference: at each start of the server.
	Generation uint64
	// Events not yet acknowledged on this stream, oldest first, at most MaxEvents.
	Events []meta.ReplicaEvent
	// Now is the chunk server's clock. Reported returns Stamp.
	Now   meta.Time
	Stamp uint64
}

// MaxEvents bounds the events of a report.
const MaxEvents = 1024

func (*Report) frameType() Type { return TReport }
func (m *Report) fields(c *coder) {
	serverInfo(c, &m.Info)
	c.fixed(&m.Generation)
	list(c, &m.Events, replicaEvent)
	c.time(&m.Now)
	c.fixed(&m.Stamp)
}

// Reported acknowledges the events of a generation up to Seq. Now is the server's clock at
// some time after the report with Stamp was sent. The server answers each report.
type Reported struct {
	Generation, Seq uint64
	Now             meta.Time
	Stamp           uint64
}

func (*Reported) frameType() Type { return TReported }
func (m *Reported) fields(c *coder) {
	c.fixed(&m.Generation)
	c.u64(&m.Seq)
	c.time(&m.Now)
	c.fixed(&m.Stamp)
}

// Order is an order to a chunk server, sent on the server's stream; OrderRe has the same id.
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
	c.volume(&o.Volume)
	c.chunkID(&o.After)
	c.u32(&o.Max)
	c.u32(&o.CRC)
	list(c, &o.Sources, serverInfo)
	c.bytes(&o.Cap)
	c.str(&o.Class)
	c.u64(&o.Rate)
	c.str(&o.Disk)
	c.bool(&o.Adopt)
	c.volume(&o.Owner)
	c.u64((*uint64)(&o.Term))
	list(c, &o.Evicted, (*coder).str)
	c.u8((*uint8)(&o.Compress))
	list(c, &o.Chunks, copySource)
	list(c, &o.Pieces, func(c *coder, p *meta.CopyPiece) { c.u32(&p.Chunk); c.u64(&p.Off); c.u64(&p.Len) })
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
	c.bool(&r.Whole)
	list(c, &r.Chunks, replicaInfo)
	c.bool(&r.More)
}

// Claim lists the session's leases and locks in a volume. The session sends Claim when Entered
// asks for claims, before any other message.
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

// Caps asks for a capability to read the volume's chunks or, with Chunk, for the capability to
// continue appending to that chunk.
type Caps struct {
	Volume meta.VolumeID
	Chunk  meta.ChunkID
}

func (*Caps) frameType() Type   { return TCaps }
func (m *Caps) fields(c *coder) { c.volume(&m.Volume); c.chunkID(&m.Chunk) }

// CapsRe answers Caps.
type CapsRe struct {
	Status Status
	Cap    []byte
	TTL    uint64 // milliseconds
}

func (*CapsRe) frameType() Type   { return TCapsRe }
func (m *CapsRe) fields(c *coder) { m.Status.fields(c); c.bytes(&m.Cap); c.u64(&m.TTL) }

// Servers announces the chunk servers to sessions.
type Servers struct{ Servers []meta.ServerInfo }

func (*Servers) frameType() Type   { return TServers }
func (m *Servers) fields(c *coder) { list(c, &m.Servers, serverInfo) }

// Reserve gives back Give bytes of the session's promise of a volume's quota, and asks for
// Want more bytes; Reserved answers. A session has at most one Reserve per volume in progress.
type Reserve struct {
	Volume meta.VolumeID
	Serial uint64 // grows; a repeated Serial is answered again and counted once
	Give   uint64
	Want   uint64
	Round  uint64 // not zero: Give is the whole idle part, as asked by Quota
	// Claim: sent among the claims after a change of owner. Want is the unused part of the
	// session's promise. The owner sends no answer.
	Claim bool
	// Inherit: another process continues the session, and sends its first Reserve in this
	// volume. Granted is then the unused part of the promises to the earlier processes.
	Inherit bool
	// Ino, Off and Len: the session will write the wanted bytes to this range of the file,
	// under an exclusive lease. If the quota has no room for Want, the owner may grant less:
	// bytes that are stored in the range and in no snapshot need no promise.
	Ino      meta.Ino
	Off, Len uint64
}

func (*Reserve) frameType() Type { return TReserve }
func (m *Reserve) fields(c *coder) {
	c.volume(&m.Volume)
	for _, x := range []*uint64{&m.Serial, &m.Give, &m.Want, &m.Round} {
		c.u64(x)
	}
	c.bool(&m.Claim)
	c.bool(&m.Inherit)
	ino(c, &m.Ino)
	c.u64(&m.Off)
	c.u64(&m.Len)
}

// Reserved answers Reserve. Errors: QuotaExceeded.
type Reserved struct {
	Status  Status
	Granted uint64 // at least Want; if Reserve names a file, possibly less, yet enough for the write
	Idle    uint64 // the session may leave up to Idle promised bytes unused
	Metered bool   // false: the volume has no quota any more, and promises are void
}

func (*Reserved) frameType() Type { return TReserved }
func (m *Reserved) fields(c *coder) {
	m.Status.fields(c)
	c.u64(&m.Granted)
	c.u64(&m.Idle)
	c.bool(&m.Metered)
}

// Quota notifies a session that a volume got or lost its quota. With a Round, Quota asks the
// session for the idle part of its promises: the session answers with a Reserve.
type Quota struct {
	Volume  meta.VolumeID
	Metered bool
	Round   uint64
	// Settle: the session must commit all bytes written unmetered before it answers.
	Settle bool
	// Overwrites: the session must reserve overwritten bytes as well.
	Overwrites bool
}

func (*Quota) frameType() Type { return TQuota }
func (m *Quota) fields(c *coder) {
	c.volume(&m.Volume)
	c.bool(&m.Metered)
	c.u64(&m.Round)
	c.bool(&m.Settle)
	c.bool(&m.Overwrites)
}
