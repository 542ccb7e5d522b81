package server

import (
	"fmt"
	"os"
	"time"

	"penstock.io/penstock/meta"
)

// Status is a server's status for an administrator.
type Status struct {
	Name         string         `json:"name"`
	Cluster      string         `json:"cluster"`
	Uptime       string         `json:"uptime"`
	PID          int            `json:"pid"`
	Sessions     []SessionInfo  `json:"sessions"`
	Volumes      []VolumeStatus `json:"volumes"`
	Calls        uint64         `json:"calls"`
	Entries      uint64         `json:"journal_entries"`
	JournalBytes uint64         `json:"journal_bytes"`
	Checkpoints  uint64         `json:"checkpoints"`
	Expired      uint64         `json:"sessions_expired"`
	Sealed       uint64         `json:"chunks_sealed"`
	Deleted      uint64         `json:"chunks_deleted"`
	// Checks are the running checks.
	Checks []CheckStatus `json:"checks,omitempty"`
	// Standbys are the volumes followed here and owned by other servers.
	Standbys []StandbyStatus `json:"standbys,omitempty"`
}

// SessionInfo is the status of a session.
type SessionInfo struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	PID  uint32 `json:"pid"`
	Idle string `json:"idle"`
}

// VolumeStatus is the status of a volume open here.
type VolumeStatus struct {
	ID      meta.VolumeID `json:"id"`
	Term    meta.Term     `json:"term"`
	Seq     meta.Seq      `json:"seq"`
	Leases  int           `json:"leases"`
	Overlay int           `json:"overlay"`
	Ready   bool          `json:"ready"`
	Failed  string        `json:"failed,omitempty"`
}

// Status describes the server.
func (s *Server) Status() Status {
	st := Status{
		Name: s.cfg.Name, Cluster: s.cfg.Cluster.ID(), Uptime: time.Since(s.epoch).Round(time.Second).String(), PID: os.Getpid(),
		Calls: s.stats.calls.Load(), Entries: s.stats.entries.Load(), JournalBytes: s.stats.journalBytes.Load(),
		Checkpoints: s.stats.checkpoints.Load(), Expired: s.stats.expired.Load(), Sealed: s.stats.sealed.Load(), Deleted: s.stats.deleted.Load(),
	}
	for _, sess := range s.clients.all() {
		st.Sessions = append(st.Sessions, SessionInfo{ID: fmt.Sprintf("%016x", uint64(sess.id)), Name: sess.name, PID: sess.pid, Idle: sess.idle().Round(time.Millisecond).String()})
	}
	for _, o := range s.hosted.owners() {
		o.mu.Lock()
		v := VolumeStatus{ID: o.vol, Term: o.own.Term(), Seq: o.durable, Leases: o.leases.Len(), Overlay: len(o.ov.m)}
		if o.failed != nil {
			v.Failed = o.failed.Error()
		}
		select {
		case <-o.recovered:
			v.Ready = true
		default:
		}
		o.mu.Unlock()
		st.Volumes = append(st.Volumes, v)
	}
	st.Standbys, _ = s.standbys.status()
	st.Checks = s.checker.checks()
	return st
}
