package offsets

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/partition"
)

// oneFile is a directory with room for a file, and the file.
type oneFile struct {
	data, synced []byte
	exists       bool
	fails        error // of the next sync
	replaced     int
}

func (f *oneFile) List(context.Context) ([]partition.Info, error) { return nil, nil }
func (f *oneFile) Remove(context.Context, string) error           { return meta.NotSupported }
func (f *oneFile) Close() error                                   { return nil }

func (f *oneFile) Open(context.Context, string, bool) (partition.File, error) {
	if !f.exists {
		return nil, meta.E("open", meta.NotFound, "g", nil)
	}
	return f, nil
}

func (f *oneFile) Create(context.Context, string) (partition.File, error) {
	f.exists = true
	return f, nil
}

func (f *oneFile) ReadFile(context.Context, string) ([]byte, error) { return f.data, nil }

func (f *oneFile) Replace(_ context.Context, _ string, data []byte) error {
	f.data, f.synced = slices.Clone(data), slices.Clone(data)
	f.replaced++
	return nil
}

func (f *oneFile) ReadAt(p []byte, off int64) (int, error) {
	if off >= int64(len(f.data)) {
		return 0, io.EOF
	}
	return copy(p, f.data[off:]), nil
}

func (f *oneFile) WriteAt(p []byte, off int64) (int, error) {
	f.data = append(f.data[:off], p...)
	return len(p), nil
}

func (f *oneFile) Truncate(size int64) error { f.data = f.data[:size]; return nil }

func (f *oneFile) Sync() error {
	if err := f.fails; err != nil {
		f.fails = nil
		return err
	}
	f.synced = slices.Clone(f.data)
	return nil
}

func open(t *testing.T, f *oneFile) *Offsets {
	t.Helper()
	o, err := Open(t.Context(), f, "g", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// TestCommits: the last commit of each partition is found after a restart that keeps the synced
// bytes and a part of the unsynced bytes.
func TestCommits(t *testing.T) {
	f := &oneFile{}
	want := map[int32]Commit{}
	for round := range int32(40) {
		o := open(t, f)
		for _, c := range o.All() {
			if want[c.Partition] != c {
				t.Fatalf("DATA: round %d: the commit is %+v, not %+v", round, c, want[c.Partition])
			}
		}
		if got := len(o.All()); got != len(want) {
			t.Fatalf("DATA: round %d: %d commits, not %d", round, got, len(want))
		}
		a := Commit{Partition: round % 3, Offset: int64(round), Epoch: -1, Time: 17, Metadata: strings.Repeat("m", int(round))}
		b := Commit{Partition: 7, Offset: int64(100 + round), Epoch: round}
		if err := o.Commit([]Commit{a, b}); err != nil {
			t.Fatal(err)
		}
		want[a.Partition], want[b.Partition] = a, b
		// The next commit is cut by a crash.
		torn := (&Commit{Partition: 7, Offset: 1 << 40}).append(nil)
		f.data = append(slices.Clone(f.synced), torn[:int(round)%len(torn)]...)
	}
	o := open(t, f)
	if err := o.Commit([]Commit{{Partition: 7, Offset: -1}}); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if l := o.All(); len(l) != 3 {
			t.Errorf("a removed commit is there: %v", l)
		}
		o = open(t, f)
	}
}

// TestFailedCommit: after a failed sync the next commit reads the file again.
func TestFailedCommit(t *testing.T) {
	f := &oneFile{}
	o := open(t, f)
	if err := o.Commit([]Commit{{Partition: 1, Offset: 5}}); err != nil {
		t.Fatal(err)
	}
	f.fails = errors.New("no space")
	if err := o.Commit([]Commit{{Partition: 1, Offset: 6}}); err == nil {
		t.Error("DATA: a commit was acknowledged without a sync")
	}
	if l := o.All(); len(l) != 1 || l[0].Offset != 5 {
		t.Errorf("DATA: a failed commit is told: %v", l)
	}
	f.data = slices.Clone(f.synced)
	if err := o.Commit([]Commit{{Partition: 2, Offset: 9}}); err != nil {
		t.Fatal(err)
	}
	if l := o.All(); fmt.Sprint(l) != fmt.Sprint(open(t, f).All()) || len(l) != 2 || l[0].Offset != 5 {
		t.Errorf("DATA: the commits are %v", l)
	}
	if err := o.Commit([]Commit{{Partition: 1, Metadata: strings.Repeat("x", MaxMetadata+1)}}); !errors.Is(err, meta.Invalid) {
		t.Errorf("long metadata: %v", err)
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	if err := o.Commit([]Commit{{Partition: 1}}); !errors.Is(err, meta.Unavailable) {
		t.Errorf("commit after Close: %v", err)
	}
}

// TestCompaction: the file stays small.
func TestCompaction(t *testing.T) {
	f := &oneFile{}
	o := open(t, f)
	for i := range int64(10_000) {
		if err := o.Commit([]Commit{{Partition: int32(i % 4), Offset: i}}); err != nil {
			t.Fatal(err)
		}
	}
	if f.replaced == 0 || len(f.data) > 2*compactMin {
		t.Errorf("the file has %d bytes after %d compactions", len(f.data), f.replaced)
	}
	for _, c := range open(t, f).All() {
		if c.Offset != 9996+int64(c.Partition) {
			t.Errorf("DATA: partition %d has offset %d", c.Partition, c.Offset)
		}
	}
	newer := (&Commit{}).append(nil)
	newer[8]++
	if _, err := decode(newer, func(Commit) {}); err != nil {
		t.Errorf("a damaged commit: %v", err)
	}
}

// oneName is a directory whose Replace fails: the first ones put another file in the place of the file
// of the name, the later ones do nothing.
type oneName struct {
	*oneFile
	replaces int // how many do replace
}

func (n *oneName) Replace(_ context.Context, _ string, data []byte) error {
	if n.replaces--; n.replaces >= 0 {
		n.oneFile = &oneFile{data: slices.Clone(data), synced: slices.Clone(data), exists: true}
	}
	return errors.New("no answer")
}

// TestFailedCompaction: commits after a compaction that failed go to the file that has the name.
func TestFailedCompaction(t *testing.T) {
	for replaces := range 3 {
		n := &oneName{oneFile: &oneFile{exists: true}, replaces: replaces}
		o, err := Open(t.Context(), n, "g", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		for i := range int64(3000) {
			if err := o.Commit([]Commit{{Partition: 1, Offset: i}}); err != nil {
				t.Fatal(err)
			}
			if i%100 != 0 && i < 2900 {
				continue
			}
			again := &Offsets{of: map[int32]Commit{}}
			if _, err := decode(n.synced, again.apply); err != nil || again.of[1].Offset != i {
				t.Fatalf("DATA: replaced %d times: after the commit of %d the file has the offset %d, %v", replaces, i, again.of[1].Offset, err)
			}
		}
	}
}

// TestCloseIsFinal: no commit opens the file again after Close, also not after an error.
func TestCloseIsFinal(t *testing.T) {
	f := &oneFile{}
	o := open(t, f)
	f.fails = errors.New("no space")
	if err := o.Commit([]Commit{{Partition: 1, Offset: 6}}); err == nil {
		t.Error("DATA: a commit was acknowledged without a sync")
	}
	if err := o.Close(); err != nil {
		t.Fatal(err)
	}
	size := len(f.data)
	if err := o.Commit([]Commit{{Partition: 1, Offset: 7}}); !errors.Is(err, meta.Unavailable) || len(f.data) != size {
		t.Errorf("DATA: a commit after Close: %v, %d bytes after %d", err, len(f.data), size)
	}
}

func FuzzDecode(f *testing.F) {
	a := &Commit{Partition: 1, Offset: 2, Epoch: 3, Time: 4, Metadata: "words"}
	f.Add(a.append(a.append(nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		var again []byte
		n, err := decode(b, func(c Commit) { again = c.append(again) })
		if n > len(b) || string(again) != string(b[:n]) {
			t.Errorf("%d bytes of %x become %x, %v", n, b, again, err)
		}
	})
}
