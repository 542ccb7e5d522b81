package meta

import "time"

// ServerHealth is the part of the cluster's health that one metadata server knows: its
// own state, etcd's, and that of its volumes and its connected peers. Lists have at most
// HealthListed entries, the most urgent first as far as that is known; Left counts the
// entries left out.
type ServerHealth struct {
	Name string    `json:"name"`
	Now  time.Time `json:"now"` // the server's clock
	// Certificate is the server's own certificate; nil without one.
	Certificate *CertHealth `json:"certificate,omitempty"`
	Etcd        EtcdHealth  `json:"etcd"`
	// JournalFull: a volume of this server takes no changes, because etcd refuses entries.
	JournalFull bool `json:"journal_full,omitempty"`
	// MetaDisk is the disk of the server's journal and state if the disk has too little room,
	// else nil.
	MetaDisk *MetaDiskHealth `json:"metadata_disk,omitempty"`
	// MetaServers are the names of metadata servers that joined the cluster and were not
	// evicted; empty in a cluster without certificates.
	MetaServers []string `json:"metadata_servers,omitempty"`

	// Nodes counts the chunk servers that were not removed, and NodesLive the ones connected
	// to this server. Total and Free are bytes on the connected chunk servers.
	Nodes     int    `json:"nodes"`
	NodesLive int    `json:"nodes_live"`
	Total     uint64 `json:"total_bytes"`
	Free      uint64 `json:"free_bytes"`
	// Away are the chunk servers that are not connected. BadDisks are the disks in a state
	// other than ok, or with less than DiskLow of their space free.
	Away     []NodeHealth `json:"away,omitempty"`
	BadDisks []DiskHealth `json:"bad_disks,omitempty"`
	// Clocks are the chunk servers whose clocks differ from this server's by more than
	// ClockSkew.
	Clocks []ClockHealth `json:"clocks,omitempty"`

	// Chunks counts the chunks of the volumes that are open here, as of the last inspection
	// some seconds ago. The chunks of closed volumes were in order when the volumes were
	// closed.
	Chunks ChunkHealth `json:"chunks"`
	// Volumes are the volumes of this server that need attention, and volumes that no server
	// could open in the last minute.
	Volumes []VolumeHealth `json:"volumes,omitempty"`
	// Standbys are the volumes whose copies on this server lag or fail.
	Standbys []StandbyHealth `json:"standbys,omitempty"`
	// Certificates are certificates of connected peers that end soon (see CertHealth.Soon).
	Certificates []CertHealth `json:"certificates,omitempty"`
	// CutOff are clients whose sessions here ended without a good-bye while they used a
	// volume, and that did not return.
	CutOff []ClientHealth `json:"cut_off,omitempty"`
	Left   int            `json:"left,omitempty"`
}

// MetaDiskHealth is a metadata server's disk with too little room.
type MetaDiskHealth struct {
	Path   string `json:"path"`
	Free   uint64 `json:"free_bytes"`
	Wanted uint64 `json:"wanted_bytes"` // with less, the server gives volumes to other servers
	// Refusing: changes to volumes here are refused, which no other server took.
	Refusing bool `json:"refusing,omitempty"`
}

// HealthListed bounds each list of a ServerHealth.
const HealthListed = 100

const (
	// DiskLow is the part of a disk's space, or of the cluster's, that should be free.
	DiskLow = 0.1
	// QuotaHigh is the part of a quota from which on the quota counts as nearly exhausted.
	QuotaHigh = 0.9
	// StandbyLag is how long a followed volume's copy may be behind: an idle journal
	// is looked at every 8 s.
	StandbyLag = 30 * time.Second
)

// CertHealth is a certificate: its bearer, "role/name", and its validity.
type CertHealth struct {
	Identity string    `json:"identity"`
	Begins   time.Time `json:"begins"`
	Ends     time.Time `json:"ends"`
}

// Soon reports that less than a quarter of the certificate's life is left. Its bearer renews a
// certificate after half of its life, so renewal has failed for a quarter of the life.
func (c *CertHealth) Soon(now time.Time) bool {
	return c.Ends.Sub(now) < c.Ends.Sub(c.Begins)/4
}

// EtcdHealth is etcd as one metadata server sees it.
type EtcdHealth struct {
	// Members is the number of etcd's members, by etcd's own answer; 0: no member
	// answered, and Error says why.
	Members int    `json:"members"`
	Error   string `json:"error,omitempty"`
	// Alarms are the raised alarms: NOSPACE, CORRUPT.
	Alarms    []string       `json:"alarms,omitempty"`
	Endpoints []EtcdEndpoint `json:"endpoints"`
}

// EtcdEndpoint is a member of etcd, as it was configured.
type EtcdEndpoint struct {
	Address string `json:"address"`
	Error   string `json:"error,omitempty"` // the member does not answer
	// Bytes is the size of the member's database file, Used the part in use, Quota the
	// largest allowed size; 0: the member does not say (before etcd 3.6).
	Bytes uint64 `json:"bytes,omitempty"`
	Used  uint64 `json:"used_bytes,omitempty"`
	Quota uint64 `json:"quota_bytes,omitempty"`
	// NoLeader: the member knows no leader, so nothing can be written.
	NoLeader bool `json:"no_leader,omitempty"`
}

// NodeHealth is a chunk server that is away.
type NodeHealth struct {
	ID   ServerID `json:"id"`
	Name string   `json:"name"`
	Gone string   `json:"gone,omitempty"` // time since this server last heard the node, if ever
}

// ClockHealth is a chunk server whose clock differs from a metadata server's.
type ClockHealth struct {
	ID    ServerID      `json:"id"`
	Name  string        `json:"name"`
	Ahead time.Duration `json:"ahead_ns" pb:"ahead"` // below zero: the chunk server's clock is behind
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

// ChunkHealth counts chunks, each by its worst problem. Open chunks count if bytes in
// them are promised.
type ChunkHealth struct {
	Volumes         int    `json:"volumes"`
	Unscanned       int    `json:"unscanned"` // volumes not inspected yet
	Chunks          uint64 `json:"chunks"`
	Lost            uint64 `json:"lost"`       // no good replica can be reached
	Endangered      uint64 `json:"endangered"` // one replica left, of several wanted
	UnderReplicated uint64 `json:"under_replicated"`
	Corrupt         uint64 `json:"corrupt"`
	Misplaced       uint64 `json:"misplaced"`
	Draining        uint64 `json:"draining"`
	Surplus         uint64 `json:"surplus"`
	Blocked         uint64 `json:"blocked"` // chunks of all these kinds that can't be repaired at present
	// Unreachable and LastReachable count further chunks: servers are away and expected back,
	// and until then no replica is reachable, or only the last of several.
	Unreachable   uint64 `json:"unreachable"`
	LastReachable uint64 `json:"last_reachable"`
	ShortBytes    uint64 `json:"short_bytes"` // in chunks that are lost, endangered or under-replicated
	Copying       int    `json:"copying"`
	CopyBytes     uint64 `json:"copy_bytes"` // still to be copied
}

// VolumeHealth is a volume that needs attention.
type VolumeHealth struct {
	ID          VolumeID `json:"id"`
	Name        string   `json:"name"`
	Failed      string   `json:"failed,omitempty"`     // why the volume could not be opened or read
	Recovering  bool     `json:"recovering,omitempty"` // no read is possible yet
	UsedBytes   uint64   `json:"used_bytes,omitempty"`
	QuotaBytes  uint64   `json:"quota_bytes,omitempty"`
	UsedInodes  uint64   `json:"used_inodes,omitempty"`
	QuotaInodes uint64   `json:"quota_inodes,omitempty"`
	// Advisory: the use counts as above the advisory quota.
	Advisory bool `json:"advisory,omitempty"`
	// Unplaceable is the reason why new chunks would find no place even with every chunk server
	// in use connected and empty: writes fail with NoSpace.
	Unplaceable string `json:"unplaceable,omitempty"`
	// Unmet is the reason why the policy can't be met even if every registered chunk
	// server were there and empty: the volume's chunks will always have too few replicas.
	Unmet string `json:"unmet,omitempty"`
	// Chunks, as in ChunkHealth.
	Lost          uint64 `json:"lost,omitempty"`
	Unreachable   uint64 `json:"unreachable,omitempty"`
	Endangered    uint64 `json:"endangered,omitempty"`
	LastReachable uint64 `json:"last_reachable,omitempty"`
	// Further counts, and chunks whose loss an operator accepted. Set only in answers about
	// single volumes.
	AcceptedLost    uint64 `json:"accepted_lost,omitempty"`
	UnderReplicated uint64 `json:"under_replicated,omitempty"`
	Corrupt         uint64 `json:"corrupt,omitempty"`
	Away            uint64 `json:"away,omitempty"` // a replica's server is away and expected back
	// GivenUpFiles and GivenUpBytes were written through clients and not durable when an
	// operator gave them up, the last ones at GivenUpAt of the client GivenUpBy: told for a day.
	GivenUpFiles uint64    `json:"given_up_files,omitempty"`
	GivenUpBytes uint64    `json:"given_up_bytes,omitempty"`
	GivenUpBy    string    `json:"given_up_by,omitempty"`
	GivenUpAt    time.Time `json:"given_up_at,omitzero"`
	// Undone is the error of the last attempt to take the scheduled snapshot that is due, and
	// UndoneSince the time of the first failed attempt.
	Undone      string    `json:"snapshot_undone,omitempty"`
	UndoneSince time.Time `json:"snapshot_undone_since,omitzero"`
}

// StandbyHealth is the copy of a volume's state on a server other than the owner's.
type StandbyHealth struct {
	Volume VolumeID `json:"volume"`
	Behind string   `json:"behind"` // the time when the copy was last at the journal's end, or "unknown"
	Error  string   `json:"error,omitempty"`
}

// ClientHealth is a client whose session ended, or that does not answer.
type ClientHealth struct {
	Name     string    `json:"name"`
	Identity string    `json:"identity,omitempty"`
	Why      string    `json:"why"`
	At       time.Time `json:"at"`
	// Kept: the session is late but not over. The session loses nothing if the client returns
	// before another session needs something that it holds.
	Kept bool `json:"kept,omitempty"`
}
