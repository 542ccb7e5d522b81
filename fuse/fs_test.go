package fuse

import (
	"log/slog"
	"testing"

	"github.com/hanwen/go-fuse/v2/fuse"

	"penstock.io/penstock/meta"
)

func TestNodeIDs(t *testing.T) {
	f := &nodes{rootVolume: 7, rootIno: 12}
	for _, c := range []struct {
		v    meta.VolumeID
		ino  meta.Ino
		node uint64
	}{
		{7, 12, 1}, {7, 1, 7<<44 | 1}, {1, 1, 1<<44 | 1}, {meta.MaxVolume, meta.MaxIno, uint64(meta.MaxVolume)<<44 | (1<<44 - 1)}, {meta.MaxVolume + meta.Views, meta.MaxIno, 1<<64 - 1}, {7, 0, 7 << 44},
	} {
		if got := f.nodeID(c.v, c.ino); got != c.node {
			t.Errorf("node of %d:%d is %#x, want %#x", c.v, c.ino, got, c.node)
		}
		if v, ino := f.split(c.node); v != c.v || ino != c.ino {
			t.Errorf("node %#x is %d:%d, want %d:%d", c.node, v, ino, c.v, c.ino)
		}
		if isText(c.node) {
			t.Errorf("node %#x counts as one of .penstock", c.node)
		}
	}
}

func TestTimes(t *testing.T) {
	for _, ns := range []meta.Time{0, 1, -1, -1e9, 1e9 - 1, -1234567890123456789, 1234567890123456789} {
		sec, nsec := ns.Unix()
		if nsec >= 1e9 || meta.TimeOf(sec, nsec) != ns {
			t.Errorf("%d ns: %d s %d ns", ns, sec, nsec)
		}
	}
}

// Every kind that a user can cause has an errno.
func TestEveryKindHasAnErrno(t *testing.T) {
	f := &fileSystem{log: slog.New(slog.DiscardHandler)}
	for kind := meta.NotFound; kind <= meta.Interrupted; kind++ {
		if st := f.status("lseek", 0, meta.E("test", kind, "", nil)); st == fuse.EIO {
			t.Errorf("%v is EIO", kind)
		}
	}
	// A chunk that is missing, short or bad says nothing about the caller's request.
	for _, kind := range []meta.Kind{meta.Corrupt, meta.NoSuchChunk, meta.NoSuchOffset} {
		if st := f.status("read", 0, meta.E("test", kind, "", nil)); st != fuse.EIO {
			t.Errorf("%v is %v to read", kind, st)
		}
	}
}

func TestSetAttrMask(t *testing.T) {
	for name, c := range map[string]struct {
		valid uint32
		want  meta.SetMask
	}{
		"chmod":           {fuse.FATTR_MODE, meta.SetMode},
		"chown":           {fuse.FATTR_UID, meta.SetUID | meta.SetKillPriv},
		"chown to nobody": {0, meta.SetKillPriv},
		"truncate":        {fuse.FATTR_SIZE | fuse.FATTR_FH, meta.SetSize},
		"by others":       {fuse.FATTR_SIZE | fuse.FATTR_KILL_SUIDGID, meta.SetSize | meta.SetKillPriv},
		"touch":           {fuse.FATTR_ATIME | fuse.FATTR_MTIME | fuse.FATTR_ATIME_NOW | fuse.FATTR_MTIME_NOW, meta.SetAtimeNow | meta.SetMtimeNow},
		"utimensat":       {fuse.FATTR_ATIME | fuse.FATTR_MTIME, meta.SetAtime | meta.SetMtime},
	} {
		in := &fuse.SetAttrIn{}
		in.Valid = c.valid
		if got := setAttr(5, in); got.Mask != c.want {
			t.Errorf("%s: mask %#x, want %#x", name, got.Mask, c.want)
		}
	}
}

func TestOverlay(t *testing.T) {
	pages := []pageWrite{{off: 0, data: []byte("aaaa")}, {off: 6, data: []byte("bbbb")}, {off: 2, data: []byte("c")}, {off: 100, data: []byte("d")}}
	p := []byte("........")
	overlay(pages, p, 1)
	if string(p) != "aca..bbb" {
		t.Errorf("DATA: overlaid: %q", p)
	}
}

// The timeouts of every answer with timeouts can be dropped.
func TestDropTimeouts(t *testing.T) {
	entry := func(b []byte) bool {
		for _, x := range b[entryTimeoutAt : entryTimeoutAt+entryTimeouts] {
			if x != 0 {
				return false
			}
		}
		return true
	}
	full := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = 0xff
		}
		return b
	}
	b := full(outHeaderSize + entrySize)
	dropTimeouts(opLookup, b)
	if !entry(b[outHeaderSize:]) || b[outHeaderSize+entryTimeoutAt-1] != 0xff || b[outHeaderSize+entryTimeoutAt+entryTimeouts] != 0xff {
		t.Error("lookup")
	}
	list := fuse.NewDirEntryList(make([]byte, 4096), 0)
	var entries []*fuse.EntryOut
	for _, name := range []string{"a", "eight888", "nine99999"} {
		e := list.AddDirLookupEntry(fuse.DirEntry{Name: name, Ino: 5})
		e.SetEntryTimeout(1e9)
		e.SetAttrTimeout(1e9)
		entries = append(entries, e)
	}
	// The list's bytes are the entries themselves.
	out := append(make([]byte, outHeaderSize), list.Bytes()...)
	dropTimeouts(opReaddirplus, out)
	_, got, err := fuse.ParseDirLookupEntries(out[outHeaderSize:])
	if err != nil || len(got) != len(entries) {
		t.Fatal(err)
	}
	for i := range got {
		if got[i].EntryTimeout() != 0 || got[i].AttrTimeout() != 0 {
			t.Errorf("entry %d keeps its timeouts", i)
		}
	}
	dropTimeouts(opLookup, make([]byte, outHeaderSize)) // an error has no body
	dropTimeouts(opGetattr, make([]byte, outHeaderSize))
	dropTimeouts(opReaddirplus, full(outHeaderSize+entrySize+direntHead)) // a name longer than the answer
}
