package partition

import (
	"errors"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/stream/log"
)

// TestReadOnly: a log that is open for reads has the records of its directory, changes nothing in
// the directory, and takes no records. The log's Contents change with the records and with the
// leaders.
func TestReadOnly(t *testing.T) {
	dir := newMemDir()
	cfg := fixed(Policy{SegmentBytes: 200})
	if l, err := OpenRead(t.Context(), dir, cfg); err != nil || l.Close() != nil {
		t.Fatal("an empty directory:", err)
	}
	seen := map[string]bool{}
	var want []string
	for leader := range 3 {
		l := open(t, dir, cfg)
		for i := range 8 {
			v := fmt.Sprint(leader, "/", i)
			if _, err := appendAll(l, batch(log.NoProducer, 0, 1, v)); err != nil {
				t.Fatal(err)
			}
			want = append(want, v)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		last := l.segments[len(l.segments)-1]
		torn := dir.files[SegmentName(last.First)]
		torn.data = append(torn.data, "of a crash"...)
		r, err := OpenRead(t.Context(), dir, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, got := values(t, r, 100); fmt.Sprint(got) != fmt.Sprint(want) || int(r.Epoch()) != leader || !r.ReadOnly() {
			t.Errorf("DATA: epoch %d has %v, not %v", r.Epoch(), got, want)
		}
		if _, err := r.Append(batch(log.NoProducer, 0, 1, "x")); !errors.Is(err, meta.ReadOnly) {
			t.Errorf("DATA: appended: %v", err)
		}
		if n, err := r.Retain(t.Context()); n > 0 || err != nil {
			t.Errorf("DATA: removed %d segments, %v", n, err)
		}
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
		now, err := Contents(t.Context(), dir)
		if err != nil || seen[now] || int64(len(torn.data)) == last.Size {
			t.Errorf("leader %d: the contents are %q as before, or the log was cut, %v", leader, now, err)
		}
		seen[now] = true
	}
}

// TestReadAfterClose: a late read returns the error of a closed log. The error does not claim
// that the records are gone, which would make a consumer skip the records.
func TestReadAfterClose(t *testing.T) {
	l := open(t, newMemDir(), Config{})
	if _, err := appendAll(l, batch(log.NoProducer, 0, 7, "x")); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if p, err := l.Read(0, 100); !errors.Is(err, meta.Unavailable) {
		t.Errorf("DATA: %d bytes, %v", len(p), err)
	}
	if at, _, ok, err := l.OffsetAt(t.Context(), 7); !errors.Is(err, meta.Unavailable) {
		t.Errorf("DATA: the time is at offset %d, %v, %v", at, ok, err)
	}
}
