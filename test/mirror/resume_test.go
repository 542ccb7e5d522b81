package mirror

import (
	"errors"
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
)

// TestResumedSendsTheRest: a round that goes on after a kill of either side sends the bytes that
// the target lacks. Some bytes under way at the kill are sent again; the round does not begin
// anew.
func TestResumedSendsTheRest(t *testing.T) {
	t.Parallel()
	a, b := newMachine(t), newMachine(t)
	a.Must("volume", "create", "src")
	src := a.volume("src")
	w := newWriter(t, src, *seed+600)
	b.Must("mirror", "create", "src", "dst", "--source-dir", a.dir, "--rate", "5M")
	b.Until("a first round", func() error { _, err := b.Ctl("mirror", "sync", "dst", "--wait"); return err })
	const files, size = 192, 256 << 10
	const total = files * size
	for k, side := range []*machine{b, a} {
		for i := range files {
			e, err := src.Create(t.Context(), nil, meta.Create{Parent: meta.RootIno, Name: fmt.Sprint(k, ".", i), Mode: meta.TypeRegular | 0o644})
			w.must(err)
			_, err = src.Write(t.Context(), nil, e.Attr.Ino, w.bytes(size), 0, false, false)
			w.must(err)
		}
		w.must(src.SyncAll(t.Context()))
		rounds := b.mirror("dst").Rounds
		b.Until("asked", func() error { _, err := b.Ctl("mirror", "sync", "dst"); return err })
		var before uint64
		b.Until("most of it is sent", func() error {
			m := b.mirror("dst")
			if m.Round == nil || m.Round.Sent < total*5/8 || !m.Round.Copied.IsZero() {
				return errors.New("not yet")
			}
			before = m.Round.Sent
			return nil
		})
		side.up.Kill()
		side.start()
		// Not by asking for another round, which would be the last round then.
		b.Until("the round has ended", func() error {
			if m := b.mirror("dst"); m.Round != nil || m.Rounds == rounds {
				return errors.New("not yet")
			}
			return nil
		})
		m := b.mirror("dst")
		same(t, src, b.volume("dst"), &m.Mirror)
		t.Logf("kill %d: after %d bytes; %d of %d were sent in all", k, before, m.Last.Sent, total)
		if m.Last.Sent < before || m.Last.Sent > total+total/3 {
			t.Errorf("kill %d: %d bytes were sent of %d, %d of them before", k, m.Last.Sent, total, before)
		}
	}
}
