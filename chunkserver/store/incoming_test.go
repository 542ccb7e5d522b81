package store

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"penstock.io/penstock/chunkserver"
	"penstock.io/penstock/meta"
)

// sealCRC is the journal's checksum of a chunk with these bytes.
func sealCRC(p []byte) uint32 {
	crcs, _ := sums(0, p)
	return chunkserver.SealCRC(crcs)
}

// receive copies p in, in pieces of n bytes.
func receive(s *Store, id meta.ChunkID, fence meta.Fence, p []byte, n int) error {
	in, err := s.Receive(ctx, id, fence, uint64(len(p)), sealCRC(p))
	if err != nil || in == nil {
		return err
	}
	defer in.Abort()
	for at := 0; at < len(p); at += n {
		if _, err := in.Write(p[at:min(at+n, len(p))]); err != nil {
			return err
		}
	}
	_, err = in.Commit(ctx)
	return err
}

// An incoming replica is whole, sealed as the journal says, once Commit returned, and does not
// exist before: after any loss of power, the death of the process, failing syncs and a full disk
// at every step. The replaced replica, open and left behind, or damaged, is unchanged until then,
// or gone; never a mixture.
func TestReceiveCrash(t *testing.T) {
	for seed := range seeds(400) {

		if err := receiveLife(seed); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
}

func receiveLife(seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 3))
	o := options()
	o.batch = 1 + int(seed%3)
	d := newMemDisk()
	if err := Init(d, o); err != nil {
		return err
	}
	s, err := Open(d, o)
	if err != nil {
		return err
	}
	id, other := testID(1), testID(257) // in one directory
	final := meta.Fence{Term: 2, Seals: 1}
	good := pattern(1+r.IntN(300_000), byte(seed))
	old := pattern(1+r.IntN(200_000), byte(seed)+1)
	if err := put1(s, other, old); err != nil {
		return err
	}
	before := "nothing"
	switch r.IntN(5) {
	case 0:
	case 1: // left behind: its writer went on elsewhere
		before = "open"
		if err := put1(s, id, old); err != nil {
			return err
		}
	case 2: // sealed, then damaged
		before = "damaged"
		if err := put1(s, id, old); err != nil {
			return err
		}
		if _, err := s.Seal(ctx, id, meta.Fence{Term: 1}, true, uint64(len(old))); err != nil {
			return err
		}
		c, err := s.use(id)
		if err != nil {
			return err
		}
		c.damaged = true
		s.touch(c)
		s.leave(c)
	case 3: // deleted here, not long ago
		if err := put1(s, id, old); err != nil {
			return err
		}
		if err := s.Delete(ctx, id, meta.Fence{Term: 1}); err != nil {
			return err
		}
	case 4: // its metadata is unreadable
		before = "unreadable"
		if err := put1(s, id, old); err != nil {
			return err
		}
		if err := s.Close(); err != nil {
			return err
		}
		i := d.inode(metaName(id))
		if len(i.durable) < 48 {
			return errors.New("a closed store's metadata isn't durable")
		}
		i.now[20] ^= 1
		i.durable[20] ^= 1
		if s, err = Open(d, o); err != nil {
			return err
		}
	}
	if r.IntN(2) == 0 {
		if err := s.Checkpoint(); err != nil {
			return err
		}
	}
	at := d.ops + 1 + r.IntN(30)
	mode := r.IntN(4)
	switch mode {
	case 0:
		d.powerAt = at
	case 1:
		d.failAt, d.failErr = at, syscall.EIO
	case 2:
		d.failAt, d.failErr = at, syscall.ENOSPC
	}
	rerr := receive(s, id, final, good, block*(1+r.IntN(3)))
	s.Abandon()
	if mode == 3 && rerr != nil {
		return fmt.Errorf("nothing failed, and yet: %w", rerr)
	}
	if mode != 3 || r.IntN(2) == 0 {
		d.dead = true
		d = d.crash(r)
	}
	d.failAt, d.powerAt = 0, 0
	if s, err = Open(d, o); err != nil {
		return err
	}
	defer s.Abandon()
	i, err := s.Peek(id)
	listed, lerr := s.Dir(ctx, id.Volume, 1)
	if lerr != nil {
		return lerr
	}
	switch there := i.State == meta.ChunkSealed && i.Fence == final; {
	case there:
		got := make([]byte, len(good))
		if err := s.Read(ctx, id, got, 0); err != nil || !bytes.Equal(got, good) || i.CRC != sealCRC(good) || i.Length != uint64(len(good)) {
			return fmt.Errorf("DATA: %+v came in, and reads wrong: %v", i, err)
		}
	case rerr == nil:
		return fmt.Errorf("it came in, and now there is %+v, %v (before %s, mode %d)", i, err, before, mode)
	case i.Length == 0 && meta.KindOf(err) != meta.Corrupt:
		if i.State != 0 && (before == "nothing" && len(listed) != 1) {
			return fmt.Errorf("something of it is seen: %+v in %v (%v)", i, listed, err)
		}
	case before == "open" && i.State == meta.ChunkOpen && err == nil, before == "damaged" && meta.KindOf(err) == meta.Corrupt:
		got := make([]byte, i.Length)
		if err := s.Read(ctx, id, got, 0); err != nil || !bytes.Equal(got, old[:i.Length]) {
			return fmt.Errorf("DATA: what it would have replaced reads wrong: %v", err)
		}
	case before == "damaged" && err == nil && i.Length == uint64(len(old)): // its mark was only in memory
	case before == "unreadable" && meta.KindOf(err) == meta.Corrupt:
	default:
		return fmt.Errorf("before %s, now %+v, %v (%v)", before, i, err, rerr)
	}
	for name := range d.dirs["."].now {
		if len(name) > 30 {
			return fmt.Errorf("%s was left", name)
		}
	}
	for name := range d.dirs[dirOf(id)].now {
		if name == id.String()+".data"+tmpSuffix || name == id.String()+".meta"+tmpSuffix && before != "damaged" && before != "open" && before != "nothing" {
			return fmt.Errorf("%s was left", name)
		}
	}
	// The replica can come in now.
	if err := receive(s, id, final, good, block); err != nil && meta.KindOf(err) != meta.Sealed {
		return fmt.Errorf("again: %w", err)
	}
	if i, err := s.Peek(other); err != nil || int(i.Length) > len(old) {
		return fmt.Errorf("its neighbour: %+v, %v", i, err)
	}
	return nil
}

func put1(s *Store, id meta.ChunkID, p []byte) error {
	if err := s.Append(ctx, id, meta.Fence{Term: 1}, 0, p, chunkserver.CRC(p)); err != nil {
		return err
	}
	_, err := s.Sync(ctx, id, uint64(len(p)))
	return err
}

// Forbidden effects of a copy.
func TestReceiveRefuses(t *testing.T) {
	d, s := memStore(t)
	id, f := testID(1), meta.Fence{Term: 1, Seals: 1}
	p := pattern(200_000, 1)
	begin := func(length uint64, crc uint32) *Incoming {
		t.Helper()
		in, err := s.Receive(ctx, id, f, length, crc)
		if err != nil || in == nil {
			t.Fatal(in, err)
		}
		return in
	}
	write := func(in *Incoming, p []byte) {
		t.Helper()
		if _, err := in.Write(p); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := receiveAll(s, id, f, 200_000, sealCRC(p), p[:100_000]); meta.KindOf(err) != meta.Corrupt {
		t.Errorf("half of it: %v", err)
	}
	bad := bytes.Clone(p)
	bad[70_000] ^= 1
	if _, err := receiveAll(s, id, f, 200_000, sealCRC(p), bad); meta.KindOf(err) != meta.Corrupt {
		t.Errorf("other bytes: %v", err)
	}
	in := begin(200_000, sealCRC(p))
	if _, err := s.Receive(ctx, id, f, 200_000, sealCRC(p)); meta.KindOf(err) != meta.Busy {
		t.Errorf("twice at once: %v", err)
	}
	write(in, p[:block])
	if _, err := s.Stat(ctx, id); meta.KindOf(err) != meta.NoSuchChunk {
		t.Errorf("on its way in it is seen: %v", err)
	}
	if _, err := s.Peek(id); meta.KindOf(err) != meta.NoSuchChunk {
		t.Errorf("on its way in it is listed: %v", err)
	}
	write(in, p[block:])
	if i, err := in.Commit(ctx); err != nil || i.State != meta.ChunkSealed || i.Fence != f || i.CRC != sealCRC(p) || i.Synced != 200_000 {
		t.Fatal(i, err)
	}
	// Idempotent, and nothing sound is replaced by something else.
	if in, err := s.Receive(ctx, id, f, 200_000, sealCRC(p)); in != nil || err != nil {
		t.Errorf("again: %v, %v", in, err)
	}
	if _, err := s.Receive(ctx, id, f, 100_000, sealCRC(p[:100_000])); meta.KindOf(err) != meta.Sealed {
		t.Errorf("another seal: %v", err)
	}
	if _, err := s.Receive(ctx, id, meta.Fence{Term: 1}, 200_000, sealCRC(p)); meta.KindOf(err) != meta.Fenced {
		t.Errorf("an old fence: %v", err)
	}
	// A later order for an existing replica: only the fence rises, and holds.
	later := meta.Fence{Term: 1, Seals: 4}
	if in, err := s.Receive(ctx, id, later, 200_000, sealCRC(p)); in != nil || err != nil {
		t.Errorf("a later order: %v, %v", in, err)
	}
	if err := s.Delete(ctx, id, meta.Fence{Term: 1, Seals: 3}); meta.KindOf(err) != meta.Fenced {
		t.Errorf("a deletion ordered before: %v", err)
	}
	id = testID(2)
	d.room = 150_000
	s.space.forget()
	if _, err := receiveAll(s, id, f, 200_000, sealCRC(p), p); meta.KindOf(err) != meta.NoSpace {
		t.Errorf("a full disk: %v", err)
	}
	if s.Err() != nil {
		t.Errorf("a full disk is no failed disk: %v", s.Err())
	}
	if n := len(d.dirs[dirOf(id)].now); n != 0 {
		t.Errorf("%d files are left of what found no room", n)
	}
}

// receiveAll receives p in one piece.
func receiveAll(s *Store, id meta.ChunkID, f meta.Fence, length uint64, crc uint32, p []byte) (*Incoming, error) {
	in, err := s.Receive(ctx, id, f, length, crc)
	if err != nil {
		return nil, err
	}
	if in == nil {
		return nil, errors.New("it is there already")
	}
	defer in.Abort()
	if _, err := in.Write(p); err != nil {
		return nil, err
	}
	_, err = in.Commit(ctx)
	return in, err
}
