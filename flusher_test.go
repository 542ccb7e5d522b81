package penstock

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"penstock.io/penstock/meta"
)

// inFakeTime runs a test with a client of a world whose clock stands still while any
// goroutine runs.
func inFakeTime(t *testing.T, cfg Config, test func(t *testing.T, w *world, v *Volume)) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, meta.Policy{Replicas: 1})
		cfg.Logger = slog.New(slog.DiscardHandler)
		c := w.client(cfg)
		v, err := c.Volume(t.Context(), "root")
		if err != nil {
			t.Fatal(err)
		}
		test(t, w, v)
		if err := c.Close(t.Context()); err != nil {
			t.Error(err)
		}
		w.check()
		s := c.sess.(*fakeSession)
		close(s.events)
		<-s.done
	})
}

// TestManyWritersSyncSideBySide: writers of many files fill the write buffer faster than
// the groups of files become durable one after the other. Several groups are synced side
// by side, and a file with few bytes waits until it has more.
func TestManyWritersSyncSideBySide(t *testing.T) {
	const files, size, takes = 12, 16 << 20, 100 * time.Millisecond
	inFakeTime(t, Config{WriteBuffer: 64 << 20}, func(t *testing.T, w *world, v *Volume) {
		w.syncTakes = func(meta.ChunkID) time.Duration { return takes }
		p := bytes.Repeat([]byte("x"), 1<<20)
		began := time.Now()
		var wg sync.WaitGroup
		for i := range files {
			ino := create(t, v, fmt.Sprint(i))
			wg.Go(func() {
				for off := int64(0); off < size; off += int64(len(p)) {
					write(t, v, ino, p, off)
				}
			})
		}
		wg.Wait()
		took := time.Since(began)
		w.mu.Lock()
		t.Logf("%d MiB through a buffer of 64 MiB in the time of %.1f syncs, of which there were %d", files*size>>20, float64(took)/float64(takes), w.chunkSyncs)
		w.mu.Unlock()
		// 128 MiB must leave the buffer before the last bytes fit.
		if took > 5*takes {
			t.Errorf("it took the time of %.1f syncs", float64(took)/float64(takes))
		}
	})
}

// TestSlowSyncHoldsUpItsGroupOnly: a disk that needs a minute for a sync delays the files
// of one group, and no writer of other files.
func TestSlowSyncHoldsUpItsGroupOnly(t *testing.T) {
	inFakeTime(t, Config{WriteBuffer: 64 << 20}, func(t *testing.T, w *world, v *Volume) {
		slow := create(t, v, "slow")
		var first meta.ChunkID
		w.syncTakes = func(id meta.ChunkID) time.Duration {
			if first.IsZero() {
				first = id
			}
			if id == first {
				return time.Minute
			}
			return 10 * time.Millisecond
		}
		p := bytes.Repeat([]byte("x"), 1<<20)
		for off := range int64(4) {
			write(t, v, slow, p, off<<20)
		}
		time.Sleep(2 * time.Second) // until the periodic flush has begun
		began := time.Now()
		for i := range 16 {
			ino := create(t, v, fmt.Sprint(i))
			for off := range int64(8) {
				write(t, v, ino, p, off<<20)
			}
		}
		for v.back.dirtyBytes.Load() > 4<<20 && time.Since(began) < time.Hour {
			time.Sleep(10 * time.Millisecond)
		}
		if took := time.Since(began); first.IsZero() || took > 5*time.Second {
			t.Errorf("beside a sync that takes a minute, 128 MiB of other files took %v", took)
		}
	})
}

// TestFlushesSideBySideKeepOrder: many files are written again and again through a buffer that is
// too small for the files, while chunks fail at random, and commits and syncs take random times.
// Each file's commits come in the order of its writes, each commit is of synced bytes
// (world.checkWrite), the buffer never exceeds its bound, and in the end all bytes are in the
// files.
func TestFlushesSideBySideKeepOrder(t *testing.T) {
	const files, size, writers, buffer = 10, 3 << 20, 5, 8 << 20
	for seed := range uint64(4) {
		inFakeTime(t, Config{WriteBuffer: buffer, FlushEvery: 50 * time.Millisecond}, func(t *testing.T, w *world, v *Volume) {
			rng := rand.New(rand.NewPCG(seed, 0)) // under w.mu
			last := make(map[meta.Ino]meta.Time)
			w.mu.Lock()
			w.syncTakes = func(meta.ChunkID) time.Duration { return time.Duration(rng.IntN(30)) * time.Millisecond }
			w.failChunk = func(what string, _ meta.ChunkID) error {
				if rng.IntN(60) == 0 {
					return meta.E(what, meta.IO, "", errors.New("the disk is broken"))
				}
				return nil
			}
			w.before = func(op meta.Op) {
				w.mu.Lock()
				wait := time.Duration(rng.IntN(20)) * time.Millisecond
				w.mu.Unlock()
				time.Sleep(wait)
			}
			w.fail = func(op meta.Op) error {
				if c, ok := op.(*meta.Write); ok {
					if c.Mtime < last[c.Ino] {
						w.bad = append(w.bad, fmt.Sprintf("inode %d: what was written at %d is committed after what was at %d", c.Ino, c.Mtime, last[c.Ino]))
					}
					last[c.Ino] = c.Mtime
				}
				return nil
			}
			w.mu.Unlock()
			want := make([][]byte, files)
			inos := make([]meta.Ino, files)
			turns := make([]chan struct{}, files) // a goroutine that waits for a mutex would stop the fake clock
			for i := range files {
				turns[i] = make(chan struct{}, 1)
				inos[i], want[i] = create(t, v, fmt.Sprint(i)), make([]byte, size)
				write(t, v, inos[i], want[i][:1], size-1) // gives the file its final length
			}
			var wg sync.WaitGroup
			var most atomic.Int64
			for n := range writers {
				wg.Go(func() {
					r := rand.New(rand.NewPCG(seed, uint64(n)+1))
					for range 40 {
						i := r.IntN(files)
						off := r.IntN(size)
						p := bytes.Repeat([]byte{byte(r.Uint32())}, 1+r.IntN(min(size-off, 1<<20)))
						turns[i] <- struct{}{}
						write(t, v, inos[i], p, int64(off))
						copy(want[i][off:], p)
						<-turns[i]
						if used := v.c.buf.inUse(); used > most.Load() {
							most.Store(used)
						}
						switch r.IntN(8) {
						case 0:
							if err := v.Fsync(t.Context(), inos[i], false); err != nil {
								t.Error(err)
							}
						case 1:
							if err := v.back.flushFiles(t.Context(), inos[:1+r.IntN(files)]); err != nil {
								t.Error(err)
							}
						case 2:
							if err := v.SyncAll(t.Context()); err != nil {
								t.Error(err)
							}
						default:
							time.Sleep(time.Duration(r.IntN(20)) * time.Millisecond)
						}
					}
				})
			}
			wg.Wait()
			if n := most.Load(); n > buffer {
				t.Errorf("%d bytes were buffered, %d may be", n, buffer)
			}
			if err := v.SyncAll(t.Context()); err != nil {
				t.Error(err)
			}
			if d, f := v.back.dirtyBytes.Load(), v.back.flying.Load(); d != 0 || f != 0 {
				t.Errorf("%d bytes are dirty after a sync, %d on their way", d, f)
			}
			for i, ino := range inos {
				if b := contents(t, v, ino); !bytes.Equal(b, want[i]) {
					t.Errorf("DATA: file %d is another than was written", i)
				}
			}
		})
	}
}

// TestFailedFlushWaitsForTheClock: a flush that fails at once, for want of space for example, is
// tried again by the clock, however many bytes wait; once space is free, all bytes are written.
func TestFailedFlushWaitsForTheClock(t *testing.T) {
	// More files than all groups under way together take.
	const files, size, every, rounds = 7 * groupFiles, 8 << 10, time.Second, 10
	const appends = files * size / gatherSize
	inFakeTime(t, Config{WriteBuffer: 64 << 20, FlushEvery: every}, func(t *testing.T, w *world, v *Volume) {
		asked, full := 0, true
		w.mu.Lock()
		w.fail = func(op meta.Op) error {
			if _, ok := op.(*meta.AllocChunks); !ok || !full {
				return nil
			}
			if asked++; asked > 50*appends { // the client asks again without a pause
				full = false
			}
			return meta.E("allocate chunk", meta.NoSpace, "", nil)
		}
		w.mu.Unlock()
		p := bytes.Repeat([]byte("x"), size)
		for i := range files {
			write(t, v, create(t, v, fmt.Sprint(i)), p, 0)
		}
		synctest.Wait()
		w.mu.Lock()
		if !full {
			t.Errorf("a chunk was asked for %d times in no time", asked)
		} else if !v.back.muchDirty() {
			t.Error("not much is dirty: nothing is tested")
		}
		asked = 0
		w.mu.Unlock()
		time.Sleep(rounds * every)
		w.mu.Lock()
		// About once a round: files whose flush has failed may be tried again in the same
		// round.
		t.Logf("in %d rounds of %d appends a chunk was asked for %d times", rounds, appends, asked)
		if asked < rounds || asked > 3*(rounds+1)*appends || !full {
			t.Error("that is not about once a round")
		}
		full = false
		w.mu.Unlock()
		time.Sleep(2 * every)
		if n := v.back.dirtyBytes.Load(); n != 0 {
			t.Errorf("%d bytes are dirty though there is room", n)
		}
	})
}
