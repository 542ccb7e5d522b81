package penstock

import (
	"bytes"
	"testing"

	"penstock.io/penstock/meta"
)

// The owner says that what is overwritten takes no room, since it is stored and in no
// snapshot. Before the write hears that, the file is cut there: then it does take room,
// and the owner is asked again.
func TestVoidAnswerAboutRoom(t *testing.T) {
	const size, at, n = 1 << 20, 512 << 10, 4096
	for what, meanwhile := range map[string]func(v *Volume, ino meta.Ino) error{
		"": func(*Volume, meta.Ino) error { return nil },
		"it is cut": func(v *Volume, ino meta.Ino) error {
			_, err := v.SetAttr(t.Context(), &Call{}, meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: at})
			return err
		},
		"a hole is punched": func(v *Volume, ino meta.Ino) error {
			return v.Fallocate(t.Context(), &Call{}, meta.Fallocate{Ino: ino, Mode: meta.FallocPunchHole | meta.FallocKeepSize, Off: at, Len: n})
		},
	} {
		t.Run(what, func(t *testing.T) {
			w := newWorld(t, meta.Policy{Replicas: 1})
			c, v := open(t, w, Config{})
			ino := create(t, v, "f")
			write(t, v, ino, bytes.Repeat([]byte("A"), size), 0)
			if err := v.Fsync(t.Context(), ino, false); err != nil {
				t.Fatal(err)
			}
			c.Metered(v.id, true, true, nil)
			times := 0
			w.mu.Lock()
			w.room = func(want uint64) uint64 {
				if times++; times > 1 {
					return want
				}
				if err := meanwhile(v, ino); err != nil {
					t.Error(err)
				}
				return 0
			}
			w.mu.Unlock()
			write(t, v, ino, bytes.Repeat([]byte("B"), n), at)
			in := v.node(ino)
			in.mu.Lock()
			promised := v.meter.has(&in.file.promised)
			in.mu.Unlock()
			in.put()
			if what == "" && (times != 1 || promised != 0) || what != "" && promised < n {
				t.Errorf("DATA: it was asked %d times, and %d bytes are promised", times, promised)
			}
			w.check()
		})
	}
}
