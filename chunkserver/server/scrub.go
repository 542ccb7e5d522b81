package server

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/chunkserver/store"
	"penstock.io/penstock/meta"
)

// Every disk is read from end to end once in a period, within half of the period, slowly and
// in the idle class of I/O. DIR/scrub keeps the position over restarts:
//
//	{"version": 1, "started": 0, "ended": 0, "after": "id of the last chunk", "chunks": 0, "bytes": 0, "bad": 0}
//
// started and ended are in nanoseconds since 1970; a pass is under way if ended is before
// started. Chunks are read by the last byte of their counter, which selects their directory,
// then by id.
const (
	scrubFile = "scrub"
	// scrubLeast is the least speed of a regular pass, scrubAsked that of a requested pass, in
	// bytes a second.
	scrubLeast = 1 << 20
	scrubAsked = 64 << 20
	// scrubSave is how often the position is written down.
	scrubSave = 20 * time.Second
)

// scrubNow begins a pass over every disk.
func (s *Server) scrubNow(rate uint64) {
	if rate == 0 {
		rate = scrubAsked
	}
	for _, d := range s.disks.list() {
		d.mu.Lock()
		if !d.scrub.stats.running() {
			d.scrub.stats = ScrubStats{Version: disksVersion, Started: time.Now().UnixNano(), Ended: d.scrub.stats.Ended}
		}
		d.scrub.asked = rate
		if d.scrub.wake != nil {
			select {
			case d.scrub.wake <- struct{}{}:
			default:
			}
		}
		d.mu.Unlock()
	}
}

// scrubDisks keeps one scrubbing goroutine for every serving disk.
func (s *Server) scrubDisks() {
	for _, d := range s.disks.list() {
		st := d.serves()
		if st == nil {
			continue
		}
		d.mu.Lock()
		if d.scrub.on != st {
			d.scrub.on = st
			if d.scrub.wake == nil {
				d.scrub.wake = make(chan struct{}, 1)
			}
			s.wg.Go(func() { s.scrubDisk(d, st) })
		}
		d.mu.Unlock()
	}
}

func (s *Server) scrubDisk(d *disk, st *store.Store) {
	// The class of I/O belongs to the thread, which ends with this goroutine.
	runtime.LockOSThread()
	const ioprioWhoProcess, ioprioIdle = 1, 3 << 13
	_, _, _ = unix.Syscall(unix.SYS_IOPRIO_SET, ioprioWhoProcess, 0, ioprioIdle)
	s.loadScrub(d)
	for s.ctx.Err() == nil && d.serves() == st {
		d.mu.Lock()
		p := d.scrub.stats
		due := time.Unix(0, p.Started).Add(s.cfg.ScrubPeriod)
		if !p.running() && s.cfg.ScrubPeriod > 0 && !time.Now().Before(due) {
			d.scrub.stats = ScrubStats{Version: disksVersion, Started: time.Now().UnixNano(), Ended: p.Ended}
			p = d.scrub.stats
		}
		wake := d.scrub.wake
		d.mu.Unlock()
		if p.running() {
			if s.scrubPass(d, st) == nil {
				continue
			}
		}
		select {
		case <-s.ctx.Done():
		case <-wake:
		case <-time.After(min(max(time.Until(due), time.Second), 5*time.Second)):
		}
	}
}

// scrubRate returns the present speed of a pass.
func (s *Server) scrubRate(d *disk, st *store.Store) uint64 {
	d.mu.Lock()
	rate := d.scrub.asked
	d.mu.Unlock()
	if rate > 0 || s.cfg.ScrubPeriod <= 0 {
		return max(rate, scrubLeast)
	}
	total, free := st.Space()
	return max(uint64(float64(total-min(free, total))*2/s.cfg.ScrubPeriod.Seconds()), scrubLeast)
}

// scrubPass continues the pass under way to its end.
func (s *Server) scrubPass(d *disk, st *store.Store) error {
	d.mu.Lock()
	after, err := meta.ParseChunkID(d.scrub.stats.After)
	begun := err == nil
	d.mu.Unlock()
	saved := time.Now()
	var pace pacer
	for dir := int(byte(after.Counter)); dir < 256; dir++ {
		ids, err := st.DirAll(s.ctx, byte(dir))
		if err != nil {
			return err
		}
		for _, id := range ids {
			if begun && dir == int(byte(after.Counter)) && id.Compare(after) <= 0 {
				continue
			}
			var n uint64
			err := st.ReadAll(s.ctx, id, func(k uint64) error {
				n += k
				return pace.wait(s.ctx, k, s.scrubRate(d, st))
			})
			if s.ctx.Err() != nil {
				s.saveScrub(d)
				return s.ctx.Err()
			}
			if d.serves() != st {
				return errors.New("the disk serves no more")
			}
			d.mu.Lock()
			p := &d.scrub.stats
			p.After = id.String()
			p.Bytes += n
			if k := meta.KindOf(err); k != meta.NoSuchChunk {
				p.Chunks++
				if err != nil {
					p.Bad++ // the store reports the chunk
				}
			}
			d.mu.Unlock()
			if time.Since(saved) > scrubSave {
				s.saveScrub(d)
				saved = time.Now()
			}
		}
	}
	d.mu.Lock()
	d.scrub.stats.Ended = time.Now().UnixNano()
	d.scrub.asked = 0
	p := d.scrub.stats
	d.mu.Unlock()
	s.slog.Info("everything on a disk was read", "disk", d.id, "path", d.path, "chunks", p.Chunks, "bytes", p.Bytes, "bad", p.Bad)
	s.saveScrub(d)
	return nil
}

func (s *Server) loadScrub(d *disk) {
	var p ScrubStats
	b, err := os.ReadFile(filepath.Join(d.path, scrubFile))
	if d.path == "" || err != nil || json.Unmarshal(b, &p) != nil || p.Version != disksVersion {
		// A new disk: the first pass is due in a period.
		now := time.Now().UnixNano()
		p = ScrubStats{Version: disksVersion, Started: now, Ended: now}
	}
	d.mu.Lock()
	if !d.scrub.stats.running() { // else somebody asked meanwhile
		d.scrub.stats = p
	}
	d.mu.Unlock()
}

func (s *Server) saveScrub(d *disk) {
	d.mu.Lock()
	p, path := d.scrub.stats, d.path
	d.mu.Unlock()
	if path == "" {
		return
	}
	if err := writeJSON(filepath.Join(path, scrubFile), p); err != nil {
		s.slog.Warn("the scrubber's position was not written down", "disk", d.id, "error", err)
	}
}

// verify carries out OrderVerify.
func (s *Server) verify(ctx context.Context, o meta.Order) (i chunkserver.Info, err error) {
	st, err := s.find(ctx, o.Chunk, false, "")
	if err != nil {
		return i, err
	}
	if i, err = st.Stat(ctx, o.Chunk); err != nil {
		return i, err
	}
	var pace pacer
	return i, st.ReadAll(ctx, o.Chunk, func(n uint64) error { return pace.wait(ctx, n, o.Rate) })
}
