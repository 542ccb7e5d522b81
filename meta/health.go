package meta

import "time"

// ServerHealth is what one metadata server tells of what might be wrong, as far as
// it knows: of itself, of etcd, of the volumes that it serves, and of who is
// connected to it. The administrative API tells it. Lists end at HealthListed entries, the
// most urgent first as far as that is known; Left counts what they left out.
type ServerHealth struct {
	Name string    `json:"name"`
	Now  time.Time `json:"now"` // of its clock
	// Certificate is its own; nil without one.
	Certificate *CertHealth `json:"certificate,omitempty"`
	Etcd        EtcdHealth  `json:"etcd"`
	// JournalFull: a volume here takes no changes, since etcd refuses them.
	JournalFull bool `json:"journal_full,omitempty"`
	// MetaDisk is the disk of its journal and state if that has too little room, else nil.
	MetaDisk *MetaDiskHealth `json:"metadata_disk,omitempty"`
	// MetaServers are the names that joined the cluster as metadata servers and
	// were not evicted; none where there are no certificates.
	MetaServers []string `json:"metadata_servers,omitempty"`

	// Nodes are the chunk servers that are not away for good, NodesLive of which this
	// server hears; Total and Free are bytes on those.
	Nodes     int    `json:"nodes"`
	NodesLive int    `json:"nodes_live"`
	Total     uint64 `json:"total_bytes"`
	Free      uint64 `json:"free_bytes"`
	// Away are the ones that it does not hear, BadDisks the disks that are not well or
	// have less than DiskLow of their room left.
	Away     []NodeHealth `json:"away,omitempty"`
	BadDisks []DiskHealth `json:"bad_disks,omitempty"`
	// Clocks are the chunk servers whose clocks differ from this server's by more than ClockSkew.
	Clocks []ClockHealth `json:"clocks,omitempty"`

	// Chunks of the volumes that are open here, as of their last inspection, some
	// seconds ago; those of closed ones were as they should be.
	Chunks ChunkHealth `json:"chunks"`
	// Volumes that it serves and that something is to be said of, and those that it was
	// to open in the last minute and that no server could open.
	Volumes []VolumeHealth `json:"volumes,omitempty"`
	// Standbys are the volumes whose copies here lag or fail.
	Standbys []StandbyHealth `json:"standbys,omitempty"`
	// Certificates of who is connected that end soon: see CertHealth.Soon.
	Certificates []CertHealth `json:"certificates,omitempty"`
	// CutOff are clients whose sessions ended here without a good-bye, while they
	// used a volume, and that did not come back.
	CutOff []ClientHealth `json:"cut_off,omitempty"`
	Left   int            `json:"left,omitempty"`
}

// MetaDiskHealth is a metadata server's disk with too little room.
type MetaDiskHealth struct {
	Path   string `json:"path"`
	Free   uint64 `json:"free_bytes"`
	Wanted uint64 `json:"wanted_bytes"` // below that volumes are given to other servers
	// Refusing: changes to volumes here are refused, which no other server took.
	Refusing bool `json:"refusing,omitempty"`
}

// HealthListed bounds each list of a ServerHealth.
const HealthListed = 100

const (
	// DiskLow is the part of a disk's room, or of the cluster's, that should be free.
	DiskLow = 0.1
	// QuotaHigh is the part of a quota beyond which it counts as nearly used up.
	QuotaHigh = 0.9
	// StandbyLag is how long a followed volume's copy may be behind: an idle journal
	// is looked at every 8 s.
	StandbyLag = 30 * time.Second
)

// CertHealth is a certificate: whose, "role/name", and from when to when it holds.
type CertHealth struct {
	Identity string    `json:"identity"`
	Begins   time.Time `json:"begins"`
	Ends     time.Time `json:"ends"`
}

// Soon reports that less than a quarter of its life is left: whoever bears one
// renews it after half of it, and has failed to for as long again.
func (c *CertHealth) Soon(now time.Time) bool {
	return c.Ends.Sub(now) < c.Ends.Sub(c.Begins)/4
}

// EtcdHealth is etcd as one metadata server sees it.
type EtcdHealth struct {
	// Members that it has by its own word; 0: nobody could be asked, and Error says why.
	Members int    `json:"members"`
	Error   string `json:"error,omitempty"`
	// Alarms that are raised: NOSPACE, CORRUPT.
	Alarms    []string       `json:"alarms,omitempty"`
	Endpoints []EtcdEndpoint `json:"endpoints"`
}

// EtcdEndpoint is a member of etcd, as it was configured.
type EtcdEndpoint struct {
	Address string `json:"address"`
	Error   string `json:"error,omitempty"` // it does not answer
	// Bytes is the size of its database file, Used what of it is in use, Quota what
	// it may grow to; 0: it does not say (before etcd 3.6).
	Bytes uint64 `json:"bytes,omitempty"`
	Used  uint64 `json:"used_bytes,omitempty"`
	Quota uint64 `json:"quota_bytes,omitempty"`
	// NoLeader: it knows of no leader, so nothing is written.
	NoLeader bool `json:"no_leader,omitempty"`
}

// NodeHealth is a chunk server that is away.
type NodeHealth struct {
	ID   ServerID `json:"id"`
	Name string   `json:"name"`
	Gone string   `json:"gone,omitempty"` // for how long, if this server ever heard it
}

// ClockHealth is a chunk server whose clock differs from a metadata server's.
type ClockHealth struct {
	ID    ServerID      `json:"id"`
	Name  string        `json:"name"`
	Ahead time.Duration `json:"ahead_ns" pb:"ahead"` // below zero: it is behind
}

// DiskHealth is a disk of a chunk server.
type DiskHealth struct {
	Node   ServerID `json:"node"`
	ID     string   `json:"id"`
	Path   string   `json:"path"`
	State  string   `json:"state"` // a DiskState's word
	Detail string   `json:"detail,omitempty"`
	Total  uint64   `json:"total_bytes"`
	Free   uint64   `json:"free_bytes"`
}

// ChunkHealth counts chunks, each by the worst that is wrong with it; those that are
// open count if bytes in them are promised.
type ChunkHealth struct {
	Volumes         int    `json:"volumes"`
	Unscanned       int    `json:"unscanned"` // of them, not looked through yet
	Chunks          uint64 `json:"chunks"`
	Lost            uint64 `json:"lost"`       // no good replica can be reached
	Endangered      uint64 `json:"endangered"` // one, of more
	UnderReplicated uint64 `json:"under_replicated"`
	Corrupt         uint64 `json:"corrupt"`
	Misplaced       uint64 `json:"misplaced"`
	Draining        uint64 `json:"draining"`
	Surplus         uint64 `json:"surplus"`
	Blocked         uint64 `json:"blocked"` // of those: nothing can be done now
	// Unreachable and LastReachable are none of those: for servers that are away and
	// waited for, no replica can be reached now, or only one of several.
	Unreachable   uint64 `json:"unreachable"`
	LastReachable uint64 `json:"last_reachable"`
	ShortBytes    uint64 `json:"short_bytes"` // in chunks that are lost, endangered or under-replicated
	Copying       int    `json:"copying"`
	CopyBytes     uint64 `json:"copy_bytes"` // still to be copied
}

// VolumeHealth is a volume that something is to be said of.
type VolumeHealth struct {
	ID          VolumeID `json:"id"`
	Name        string   `json:"name"`
	Failed      string   `json:"failed,omitempty"`     // it could not be opened or read, and why
	Recovering  bool     `json:"recovering,omitempty"` // nothing of it can be read yet
	UsedBytes   uint64   `json:"used_bytes,omitempty"`
	QuotaBytes  uint64   `json:"quota_bytes,omitempty"`
	UsedInodes  uint64   `json:"used_inodes,omitempty"`
	QuotaInodes uint64   `json:"quota_inodes,omitempty"`
	// Advisory: it counts as above its advisory quota.
	Advisory bool `json:"advisory,omitempty"`
	// Unplaceable is why new chunks have nowhere to go even if every chunk server
	// that is in use were there and empty: writes fail with NoSpace.
	Unplaceable string `json:"unplaceable,omitempty"`
	// Chunks, as in ChunkHealth.
	Lost          uint64 `json:"lost,omitempty"`
	Unreachable   uint64 `json:"unreachable,omitempty"`
	Endangered    uint64 `json:"endangered,omitempty"`
	LastReachable uint64 `json:"last_reachable,omitempty"`
	// More of them, and those that an operator accepted as lost: only where volumes
	// alone were asked for.
	AcceptedLost    uint64 `json:"accepted_lost,omitempty"`
	UnderReplicated uint64 `json:"under_replicated,omitempty"`
	Corrupt         uint64 `json:"corrupt,omitempty"`
	Away            uint64 `json:"away,omitempty"` // a replica's server is out of reach, which is waited for
	// Undone is why the snapshot that is due by the volume's schedule could not be
	// taken, at the last try, and UndoneSince when it could not for the first time.
	Undone      string    `json:"snapshot_undone,omitempty"`
	UndoneSince time.Time `json:"snapshot_undone_since,omitzero"`
}

// StandbyHealth is the copy of a volume's state that a server keeps for another to
// own.
type StandbyHealth struct {
	Volume VolumeID `json:"volume"`
	Behind string   `json:"behind"` // since when it was last at the journal's end, or "unknown"
	Error  string   `json:"error,omitempty"`
}

// ClientHealth is a client whose session ended, or that is not heard of.
type ClientHealth struct {
	Name     string    `json:"name"`
	Identity string    `json:"identity,omitempty"`
	Why      string    `json:"why"`
	At       time.Time `json:"at"`
	// Kept: its session is not over, and loses nothing if it is heard of again before somebody
	// needs what it holds.
	Kept bool `json:"kept,omitempty"`
}
