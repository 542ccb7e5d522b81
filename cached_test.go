package penstock

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

// silent runs fn while the owner and the servers answer no request.
func (w *world) silent(fn func()) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		fn()
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		w.t.Error("a question was asked of what is to be answered from memory")
	}
}

// TestCached: cached state is returned without a request, and no other state is.
func TestCached(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1})
	_, a := open(t, w, Config{})
	small, large := bytes.Repeat([]byte("small"), 500), bytes.Repeat([]byte("large"), 5000)
	files := map[string][]byte{"small": small, "large": large}
	inos := map[string]meta.Ino{}
	for name, b := range files {
		inos[name] = create(t, a, name)
		write(t, a, inos[name], b, 0)
		if err := a.Fsync(t.Context(), inos[name], false); err != nil {
			t.Fatal(err)
		}
		a.Release(t.Context(), inos[name], rdwr)
	}
	b, vb := open(t, w, Config{})
	// known returns a letter for each kind of answer about a file that comes from memory.
	known := func(name string) (l string) {
		t.Helper()
		w.silent(func() {
			if e, ok := vb.LookupCached(meta.RootIno, name); ok {
				if l += "L"; e.Attr.Ino != inos[name] || e.Attr.Size != uint64(len(files[name])) || e.Valid <= 0 {
					t.Errorf("%s is %+v", name, e)
				}
			}
			if e, ok := vb.GetAttrCached(inos[name]); ok {
				if l += "A"; e.Attr.Size != uint64(len(files[name])) {
					t.Errorf("%s is %+v", name, e)
				}
			}
			if info, ok := vb.OpenCached(inos[name], 0); ok {
				if l += "O"; !info.KeepCache || info.DirectIO || info.Sealed {
					t.Errorf("%s is opened as %+v", name, info)
				}
				if !vb.ReleaseCached(inos[name], 0) {
					t.Errorf("%s was not released", name)
				}
			}
			p := make([]byte, 1<<20)
			if n, ok := vb.ReadCached(inos[name], p, 0, true); ok {
				if l += "R"; !bytes.Equal(p[:n], files[name]) {
					t.Errorf("DATA: %s has other bytes", name)
				}
			}
		})
		return l
	}
	expect := func(when string, want map[string]string) {
		t.Helper()
		for name, l := range want {
			if got := known(name); got != l {
				t.Errorf("%s: of %s %q is answered, not %q", when, name, got, l)
			}
		}
	}
	look := func() {
		t.Helper()
		for name := range files {
			if _, err := vb.Lookup(t.Context(), meta.RootIno, name); err != nil {
				t.Fatal(err)
			}
		}
	}
	reopen := func() {
		t.Helper()
		for _, ino := range inos {
			if _, err := vb.Open(t.Context(), &Call{}, ino, 0); err != nil {
				t.Fatal(err)
			}
			vb.Release(t.Context(), ino, 0)
		}
	}
	expect("at first", map[string]string{"small": "", "large": ""})
	look()
	expect("after a lookup", map[string]string{"small": "LA", "large": "LA"})
	reopen()
	expect("after an open", map[string]string{"small": "LAOR", "large": "LAO"})

	if _, ok := vb.LookupCached(meta.RootIno, "none"); ok {
		t.Error("a name was found that nobody looked for")
	}
	if _, err := vb.Lookup(t.Context(), meta.RootIno, "none"); err != nil {
		t.Fatal(err)
	}
	if e, ok := vb.LookupCached(meta.RootIno, "none"); !ok || !e.Negative || e.Valid <= 0 {
		t.Errorf("an absent name: %+v %v", e, ok)
	}
	// A directory made by this client is known completely; absent names are known, too.
	made, err := vb.Create(t.Context(), &Call{}, meta.Create{Parent: meta.RootIno, Name: "dir", Mode: meta.TypeDir | 0o755})
	if err != nil {
		t.Fatal(err)
	}
	d := made.Attr.Ino
	if e, ok := vb.LookupCached(d, "none"); !ok || !e.Negative {
		t.Errorf("a name in a new directory: %+v %v", e, ok)
	}
	for _, name := range []string{".", "..", strings.Repeat("n", meta.MaxName+1)} {
		if _, ok := vb.LookupCached(d, name); ok {
			t.Errorf("a name of %d bytes is answered from memory", len(name))
		}
	}
	for _, flags := range []uint32{rdwr, 1, flagTrunc} {
		if _, ok := vb.OpenCached(inos["small"], flags); ok {
			t.Errorf("opened with flags %#x", flags)
		}
	}
	if _, ok := vb.OpenCached(meta.RootIno, 0); ok {
		t.Error("a directory was opened")
	}

	// Another client changes the file.
	files["small"] = append([]byte("other"), small[5:]...)
	write(t, a, inos["small"], []byte("other"), 0)
	expect("after it was changed elsewhere", map[string]string{"small": "", "large": "LAO"})
	look()
	reopen()
	expect("after it was asked for again", map[string]string{"small": "LAOR", "large": "LAO"})

	// While a recall is being worked off, and after the session's clock ran out.
	in := vb.node(inos["small"])
	in.mu.Lock()
	in.recall = &recall{}
	in.mu.Unlock()
	for _, l := range despiteRecall(vb, inos["small"]) {
		t.Errorf("%s during a recall", l)
	}
	in.mu.Lock()
	in.recall = nil
	in.mu.Unlock()
	in.put()
	s := b.sess.(*fakeSession)
	left := s.left
	s.left = 0
	expect("without a lease", map[string]string{"small": "", "large": ""})
	s.left = left

	// The last opener of a file without a name does more than count.
	if _, ok := vb.OpenCached(inos["small"], 0); !ok {
		t.Fatal("not opened")
	}
	if _, ok := vb.OpenCached(inos["small"], 0); !ok {
		t.Fatal("not opened")
	}
	if err := vb.Unlink(t.Context(), &Call{}, meta.RootIno, "small", false); err != nil {
		t.Fatal(err)
	}
	if !vb.ReleaseCached(inos["small"], 0) {
		t.Error("not the last, not released")
	}
	if vb.ReleaseCached(inos["small"], 0) {
		t.Error("the last was released without burying the file")
	}
	vb.Release(t.Context(), inos["small"], 0)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		w.mu.Lock()
		n := w.calls[meta.OpReleaseOrphans]
		w.mu.Unlock()
		if n > 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("a file without a name stays")
		}
	}
	w.check()
}

// despiteRecall lists the answers that still come from memory while a recall is under
// way.
func despiteRecall(v *Volume, ino meta.Ino) (l []string) {
	if _, ok := v.OpenCached(ino, 0); ok {
		l = append(l, "opened")
	}
	if _, ok := v.ReadCached(ino, make([]byte, 10), 0, true); ok {
		l = append(l, "read")
	}
	if e, ok := v.GetAttrCached(ino); ok && e.Valid > 0 {
		l = append(l, "attributes")
	}
	return l
}

// A sealed file may be read by the kernel from a descriptor, which is asked for.
func TestSealedIsNotOpenedCached(t *testing.T) {
	w := newWorld(t, meta.Policy{Replicas: 1, SealOnClose: true})
	_, v := open(t, w, Config{})
	ino := create(t, v, "f")
	write(t, v, ino, []byte("sealed"), 0)
	v.Release(t.Context(), ino, rdwr)
	for range 2 {
		if _, ok := v.OpenCached(ino, 0); ok {
			t.Fatal("opened")
		}
		if _, err := v.Open(t.Context(), &Call{}, ino, 0); err != nil {
			t.Fatal(err)
		}
		v.Release(t.Context(), ino, 0)
	}
}
