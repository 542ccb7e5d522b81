package namespace

import (
	"encoding/hex"
	"reflect"
	"testing"

	"penstock.io/penstock/meta"
)

// TestKeptVolumeRecords: the volume records below, of version 1, decode to the values
// with which they were written, and are encoded to the same bytes.
func TestKeptVolumeRecords(t *testing.T) {
	plain := volume{id: 7, gen: 1, nextIno: 300, inodes: 12, bytes: 70000, chunks: 5,
		policy: meta.Policy{QuotaBytes: 1 << 30, QuotaInodes: 1000, Replicas: 2, MaxChunk: 64 << 20, SyncOnClose: true, LocalFirst: true}}
	placed := plain
	placed.policy.Topology, placed.policy.Spread, placed.policy.Class, placed.policy.LocalFirst = "/dc1/rack3", meta.SpreadRack, "nvme", false
	shot := plain
	shot.gen, shot.lastSnap, shot.snaps, shot.buried = 9, 8, 3, 4096
	clone := shot
	clone.gen, clone.lastSnap, clone.snaps, clone.base = 4+cloneGens+3, 4+cloneGens+1, 2, &base{gaps: []gap{{4, 4 + cloneGens}}}
	told := clone
	told.events = eventLog{keep: 100_000, first: 17, next: 140}
	untold := shot
	untold.events = eventLog{first: 140, next: 140}
	counted := told
	counted.policy.QuotaSnapshots, counted.tally = true, tally{mode: tallyExact, alone: 70000, ref: 4 + cloneGens + 1, epoch: 3}
	begun := shot
	begun.policy.QuotaSnapshots, begun.tally = true, tally{mode: tallyBegun, alone: -5, ref: 8}
	least := plain
	least.policy.Replicas, least.policy.MinReplicas = 5, 3
	for _, c := range []struct {
		record string
		want   volume
	}{
		{keptPlain, plain}, {keptPlaced, placed}, {keptSnapshots, shot}, {keptClone, clone}, {keptEvents, told}, {keptEventsOff, untold}, {keptTally, counted}, {keptTallyBegun, begun}, {keptLeast, least},
	} {
		b, err := hex.DecodeString(c.record)
		if err != nil {
			t.Fatal(err)
		}
		var v volume
		if err := decodeVolume(b, &v); err != nil || !reflect.DeepEqual(v, c.want) {
			t.Errorf("%s: %+v, %v; want %+v", c.record, v, err, c.want)
		}
		if again := hex.EncodeToString(appendVolume(nil, &c.want)); again != c.record {
			t.Errorf("%d bytes are written as %s, was %s", len(b), again, c.record)
		}
	}
	if err := decodeVolume([]byte{volumeV1 + 1, 7}, new(volume)); meta.KindOf(err) != meta.Version {
		t.Errorf("a newer version: %v", err)
	}
}

const (
	keptPlain      = "01000701ac020cf0a204058080808004e807028080802004"
	keptPlaced     = "01010701ac020cf0a204058080808004e80702808080200400010a2f6463312f7261636b33046e766d65"
	keptSnapshots  = "01020709ac020cf0a204058080808004e80702808080200408038020"
	keptClone      = "01060787808008ac020cf0a204058080808004e80702808080200485808008028020010484808008"
	keptEvents     = "010e0787808008ac020cf0a204058080808004e80702808080200485808008028020010484808008a08d06118c01"
	keptEventsOff  = "010a0709ac020cf0a204058080808004e80702808080200408038020008c018c01"
	keptTally      = "011e0787808008ac020cf0a204058080808004e80702808080200485808008028020010484808008a08d06118c0102e0c5088580800803"
	keptTallyBegun = "01120709ac020cf0a204058080808004e8070280808020040803802001090800"
	keptLeast      = "01200701ac020cf0a204058080808004e80705808080200403"
)

// TestRollbackCountsOn: change counters go on over a rollback, like inode numbers and
// cookies, so that no client takes an old state for the state that it has seen (rule 17).
func TestRollbackCountsOn(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	for i := range 5 {
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: uint32(i)})
	}
	seen := f.attr(ino)
	for op := (&meta.Rollback{To: at}); ; {
		res := f.do(op)
		if op.From = res.Data; res.EOF {
			break
		}
	}
	if now := f.attr(ino); now.Mode&meta.ModePerm != 0o644 || now.Change <= seen.Change {
		t.Errorf("mode %o, change %d after %d", now.Mode, now.Change, seen.Change)
	}
}

// TestGaps: a clone leaves out exactly the generations that its origin may still reach,
// and the origin reaches no others.
func TestGaps(t *testing.T) {
	b := &base{gaps: []gap{{4, 4 + cloneGens}, {4 + cloneGens + 3, 4 + 2*cloneGens + 3}}}
	for gen, hidden := range map[uint32]bool{
		1: false, 4: false, 5: true, 4 + cloneGens: true, 4 + cloneGens + 1: false, 4 + cloneGens + 3: false, 4 + cloneGens + 4: true,
		4 + 2*cloneGens + 3: true, 4 + 2*cloneGens + 4: false,
	} {
		if b.hides(gen) != hidden {
			t.Errorf("generation %d: hidden %v", gen, !hidden)
		}
	}

	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	f.do(&meta.PinClone{At: at, Clone: 9})
	raw, _, err := f.s.Get(volumeKey)
	var v volume
	if err == nil {
		err = decodeVolume(raw, &v)
	}
	if err != nil {
		t.Fatal(err)
	}
	v.gen = uint32(at) + cloneGens - 2 // as after so many snapshots
	f.commit([]Effect{{Put, volumeKey, appendVolume(nil, &v)}})
	last := meta.Generation(f.do(&meta.TakeSnapshot{Name: "last"}).Off)
	f.fails(meta.ResourceExceeded, &meta.TakeSnapshot{Name: "more"})
	if last+1 > at+cloneGens {
		t.Errorf("the origin lives in generation %d, the gap ends with %d", last+1, at+cloneGens)
	}
	f.do(&meta.PinClone{At: at, Clone: 9, Drop: true})
	f.do(&meta.TakeSnapshot{Name: "more"})
}

// TestMaxClones: a snapshot can have the largest number of clones and no more.
func TestMaxClones(t *testing.T) {
	f := newFixture(t)
	at := meta.Generation(f.do(&meta.TakeSnapshot{Name: "s"}).Off)
	for i := range meta.MaxClones {
		f.do(&meta.PinClone{At: at, Clone: meta.VolumeID(100 + i)})
	}
	f.fails(meta.ResourceExceeded, &meta.PinClone{At: at, Clone: 99})
	f.do(&meta.PinClone{At: at, Clone: 100}) // clone 100 exists
	f.do(&meta.PinClone{At: at, Clone: 100, Drop: true})
	f.do(&meta.PinClone{At: at, Clone: 99})
}

// TestQuotaOfPromises: bytes promised to other sessions are not taken, and bytes promised
// to the caller are admitted, both exactly.
func TestQuotaOfPromises(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	f.do(&meta.SetPolicy{Policy: meta.Policy{Replicas: 1, QuotaBytes: 100}})
	for _, c := range []struct {
		bytes          int
		reserved, held uint64
		ok             bool
	}{
		{40, 0, 60, true}, {41, 0, 60, false}, {41, 41, 60, true}, {42, 41, 60, false}, {100, 0, 0, true}, {101, 0, 0, false},
	} {
		at := f.ctx()
		at.Reserved, at.Held = c.reserved, c.held
		_, _, err := Execute(f.s, at, &meta.Write{Ino: ino, Inline: true, Data: make([]byte, c.bytes), Size: uint64(c.bytes)})
		if c.ok && err != nil || !c.ok && meta.KindOf(err) != meta.QuotaExceeded {
			t.Errorf("%d bytes of 100, %d promised, %d to others: %v", c.bytes, c.reserved, c.held, err)
		}
	}
}

// TestManyEndsAfterSnapshots: one operation writes more extents, over tombstones that a
// snapshot sees, than an operation remembers.
func TestManyEndsAfterSnapshots(t *testing.T) {
	const n = maxEnds + 40
	f := newFixture(t)
	ino, id := f.file("f"), f.chunks(1, false)[0]
	op := &meta.Write{Ino: ino, Synced: true, Size: n * 4096}
	for i := range uint64(n) {
		op.Extents = append(op.Extents, meta.Extent{Off: i * 4096, Len: 4096, Chunk: id, ChunkOff: i * 8192})
	}
	for i := range 3 {
		f.do(op)
		f.do(&meta.TakeSnapshot{Name: string(rune('a' + 2*i))})
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetSize})
		f.do(&meta.TakeSnapshot{Name: string(rune('b' + 2*i))})
		f.check()
	}
}
