// Package snapshots tests snapshots of a whole system: clients with buffers, a metadata
// server, a journal and a chunk server, all real, in one process.
package snapshots

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/cmd/penstock/local"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
	"penstock.io/penstock/test/operator"
)

func up(t *testing.T) *local.System {
	t.Helper()
	return upWith(t, slog.New(slog.NewTextHandler(io.Discard, nil)))
}

func upWith(t *testing.T, log *slog.Logger) *local.System { return upAs(t, local.Config{Logger: log}) }

// upAs starts a system with cfg; upAs fills in the directory and the unsafe switches.
func upAs(t *testing.T, cfg local.Config) *local.System {
	t.Helper()
	unsafe, err := local.Controls(os.Getenv(local.ControlVariable), cfg.Logger)
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "sn") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	cfg.Dir, cfg.Unsafe = dir, unsafe
	s, err := local.Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return s
}

func dial(t *testing.T, s *local.System, name string) *penstock.Client {
	t.Helper()
	c, err := penstock.Dial(t.Context(), penstock.Config{Meta: []string{s.Meta.Addr}, Name: name, FlushEvery: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		c.Close(ctx)
	})
	return c
}

func connect(t *testing.T, s *local.System, name string) *penstock.Volume {
	t.Helper()
	v, err := dial(t, s, name).VolumeByID(t.Context(), meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

type quiet struct{}

func (quiet) Granted(meta.VolumeID, meta.Grant) {}
func (quiet) Recall(_ meta.Recall, done func()) { done() }
func (quiet) Expired([]meta.VolumeID, error)    {}

// record is the size in bytes of a usual append; other appends are shorter or longer.
const record = 6000

// A kind is a way to store a counter in files. write sets the counter to n, and returns
// at the moment when an application would continue; read returns the counter in a
// snapshot.
type kind struct {
	name  string
	write func(ctx context.Context, v *penstock.Volume, ino meta.Ino, name string, n uint64) error
	read  func(r *reader, name string) (uint64, error)
}

// reader reads at a snapshot.
type reader struct {
	ctx context.Context
	s   *client.Session
	vol meta.VolumeID
	at  meta.Generation
}

func (r *reader) open(name string) (*meta.Result, error) {
	e, err := r.s.DoAt(r.ctx, r.vol, r.at, &meta.Lookup{Parent: meta.RootIno, Name: name})
	if err != nil {
		return nil, err
	}
	res, err := r.s.DoAt(r.ctx, r.vol, r.at, &meta.Open{Ino: e.Attr.Ino})
	if err != nil {
		return nil, err
	}
	end := uint64(len(res.Data))
	for _, x := range res.Extents {
		if x.OpenEnded || x.Off != end {
			return nil, fmt.Errorf("DATA: %s in the snapshot: %+v after %d bytes", name, x, end)
		}
		end = x.End()
	}
	if end != res.Attr.Size {
		return nil, fmt.Errorf("DATA: %s in the snapshot has %d bytes mapped, its size is %d", name, end, res.Attr.Size)
	}
	return res, nil
}

func appended(size int, sync bool) func(context.Context, *penstock.Volume, meta.Ino, string, uint64) error {
	return func(ctx context.Context, v *penstock.Volume, ino meta.Ino, _ string, n uint64) error {
		if _, err := v.Write(ctx, nil, ino, make([]byte, size), 0, true, false); err != nil || !sync {
			return err
		}
		return v.Fsync(ctx, ino, true)
	}
}

func counted(size uint64) func(*reader, string) (uint64, error) {
	return func(r *reader, name string) (uint64, error) {
		res, err := r.open(name)
		if err != nil {
			return 0, err
		}
		if res.Attr.Size%size != 0 {
			return 0, fmt.Errorf("DATA: %s has %d bytes in the snapshot: half a write", name, res.Attr.Size)
		}
		return res.Attr.Size / size, nil
	}
}

var kinds = []kind{
	{"overwritten", func(ctx context.Context, v *penstock.Volume, ino meta.Ino, _ string, n uint64) error {
		_, err := v.Write(ctx, nil, ino, binary.BigEndian.AppendUint64(nil, n), 0, false, false)
		return err
	}, func(r *reader, name string) (uint64, error) {
		res, err := r.open(name)
		if err != nil || len(res.Data) == 0 {
			return 0, err
		}
		return binary.BigEndian.Uint64(res.Data), nil
	}},
	{"appended", appended(record, false), counted(record)},
	{"synced", appended(record, true), counted(record)}, // open-ended after a while
	{"large", appended(300_000, false), counted(300_000)},
	{"renamed", func(ctx context.Context, v *penstock.Volume, _ meta.Ino, name string, n uint64) error {
		return v.Rename(ctx, nil, meta.RootIno, fmt.Sprint(name, ".", n-1), meta.RootIno, fmt.Sprint(name, ".", n), 0)
	}, func(r *reader, name string) (uint64, error) {
		l, err := r.s.DoAt(r.ctx, r.vol, r.at, &meta.ReadDir{Ino: meta.RootIno, Max: 4096})
		if err != nil {
			return 0, err
		}
		var n uint64
		found := 0
		for _, e := range l.Entries {
			if _, err := fmt.Sscanf(e.Name, name+".%d", &n); err == nil {
				found++
			}
		}
		if found != 1 {
			return 0, fmt.Errorf("DATA: %d names of %s in the snapshot", found, name)
		}
		return n, nil
	}},
}

// pair is two counters: one client writes the first, and tells a second client, which
// then writes the second counter.
type pair struct {
	name        [2]string
	of          [2]kind
	ino         [2]meta.Ino
	begun, done [2]atomic.Uint64
}

// newPair makes the files of a pair, one file in each volume.
func newPair(t *testing.T, vols [2]*penstock.Volume, a, b kind) *pair {
	t.Helper()
	p := &pair{of: [2]kind{a, b}}
	for side := range 2 {
		p.name[side] = fmt.Sprintf("%s-%s-%d", a.name, b.name, side)
		name := p.name[side]
		if p.of[side].name == "renamed" {
			name += ".0"
		}
		info, err := vols[side].CreateOpen(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: name, Mode: meta.TypeRegular | 0o644}, uint32(os.O_RDWR))
		if err != nil {
			t.Fatal(err)
		}
		p.ino[side] = info.Entry.Attr.Ino
	}
	return p
}

// count writes both counters in turn, each when the other was written, until ctx ends.
func (p *pair) count(ctx context.Context, t *testing.T, vols [2]*penstock.Volume) {
	for n := uint64(1); ctx.Err() == nil && n < 1500; n++ {
		for side := range 2 {
			p.begun[side].Store(n)
			if err := p.of[side].write(t.Context(), vols[side], p.ino[side], p.name[side], n); err != nil {
				t.Errorf("%s to %d: %v", p.name[side], n, err)
				return
			}
			p.done[side].Store(n)
		}
		time.Sleep(time.Millisecond)
	}
}

// TestAtomic: client W1 writes A and tells client W2, which then writes B, in files and
// names of every kind, while the test takes snapshots. Each snapshot must have all writes
// that returned before the call, no write begun after the call, and never B without A.
func TestAtomic(t *testing.T) {
	s := up(t)
	vols := [2]*penstock.Volume{connect(t, s, "w1"), connect(t, s, "w2")}
	var pairs []*pair
	for i, a := range kinds {
		for _, b := range []kind{kinds[i], kinds[(i+1)%len(kinds)], kinds[(i+3)%len(kinds)]} {
			pairs = append(pairs, newPair(t, vols, a, b))
		}
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var wg sync.WaitGroup
	for _, p := range pairs {
		wg.Go(func() { p.count(ctx, t, vols) })
	}
	sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.Meta.Addr}, Role: wire.RoleClient, Name: "reader", Handler: quiet{}})
	if err != nil {
		t.Fatal(err)
	}
	defer sess.Close(context.Background())
	o := operator.New(t, s.Meta.Addr, nil)
	var longest time.Duration
	for i := range 12 {
		before := make([][2]uint64, len(pairs))
		var sn meta.SnapshotInfo
		var began time.Time
		for end := time.Now().Add(time.Minute); ; {
			for j, p := range pairs {
				before[j] = [2]uint64{p.done[0].Load(), p.done[1].Load()}
			}
			began = time.Now()
			if sn, err = o.TakeWhole(t.Context(), meta.RootVolume, fmt.Sprint("s", i)); err == nil {
				break
			}
			// A machine may be too busy for clients to answer within a second.
			if !errors.Is(err, meta.Unavailable) || time.Now().After(end) {
				t.Fatal(err)
			}
			t.Log(err)
		}
		longest = max(longest, time.Since(began))
		r := &reader{t.Context(), sess, meta.RootVolume, sn.At}
		for j, p := range pairs {
			var n [2]uint64
			for side := range 2 {
				if n[side], err = p.of[side].read(r, p.name[side]); err != nil {
					t.Fatal(err)
				}
				if n[side] < before[j][side] {
					t.Errorf("DATA: snapshot %d: %s is %d; write returned for %d before the call", i, p.name[side], n[side], before[j][side])
				}
				if n[side] > p.begun[side].Load() {
					t.Errorf("DATA: snapshot %d: %s is %d, which nobody wrote", i, p.name[side], n[side])
				}
			}
			if n[1] > n[0] || n[0] > n[1]+1 {
				t.Errorf("DATA: snapshot %d: %s is %d, %s is %d: no such moment was", i, p.name[0], n[0], p.name[1], n[1])
			}
		}
		if t.Failed() {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	stop()
	wg.Wait()
	var wrote uint64
	for _, p := range pairs {
		wrote += p.done[0].Load()
	}
	t.Logf("%d pairs written %d times; the longest of 12 snapshots took %v", len(pairs), wrote, longest)
	for i := range 12 {
		if i%3 == 0 || t.Failed() {
			continue
		}
		if _, err := o.DeleteSnapshot(t.Context(), meta.RootVolume, fmt.Sprint("s", i)); err != nil {
			t.Error(err)
		}
	}
	for side, v := range vols {
		if err := v.SyncAll(t.Context()); err != nil {
			t.Errorf("w%d: %v", side+1, err)
		}
	}
	report, err := s.Meta.Server.Fsck(t.Context(), meta.RootVolume)
	if err != nil {
		t.Fatal(err)
	}
	if report.Count > 0 {
		t.Error("DATA: fsck:", report.Problems)
	}
}
