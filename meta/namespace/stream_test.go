package namespace

import (
	"testing"

	"penstock.io/penstock/meta"
)

// TestStreamsAreKept: a caller that does not serve streams can't change the contents of a
// stream's files by any operation, nor add a name to a stream's directory; it can read,
// rename, remove and chmod.
func TestStreamsAreKept(t *testing.T) {
	f := newFixture(t)
	dir := func(parent meta.Ino, name string) meta.Ino {
		return f.do(&meta.Create{Parent: parent, Name: name, Mode: meta.TypeDir | 0o755}).Attr.Ino
	}
	foreign, top := f.file("foreign"), dir(1, "log")
	for range 2 {
		if a := f.do(&meta.SetAttr{Ino: top, Mask: meta.SetStream}).Attr; a.Flags&meta.FlagStream == 0 {
			t.Fatalf("%+v", a)
		}
	}
	p := dir(top, "0")
	seg := f.do(&meta.Create{Parent: p, Name: "seg", Mode: meta.TypeRegular | 0o444}).Attr
	if seg.Flags&meta.FlagStream == 0 {
		t.Fatalf("a file in a stream's directory: %+v", seg)
	}
	link := f.do(&meta.Create{Parent: p, Name: "link", Mode: meta.TypeSymlink, Target: "x"}).Attr
	if link.Flags != 0 {
		t.Errorf("a symbolic link: %+v", link)
	}
	f.fails(meta.Invalid, &meta.SetAttr{Ino: link.Ino, Mask: meta.SetStream})
	write := func(ino meta.Ino) *meta.Write {
		return &meta.Write{Ino: ino, Inline: true, Data: []byte("abc"), Size: 3}
	}
	f.do(write(seg.Ino))
	f.do(write(foreign))
	temp := f.do(&meta.Tmpfile{Parent: 1, Mode: 0o600}).Attr.Ino

	f.noStreams = true
	for name, op := range map[string]meta.Op{
		"write":          write(seg.Ino),
		"grow":           &meta.Write{Ino: seg.Ino, Size: 100},
		"seal":           &meta.Write{Ino: seg.Ino, Seal: true},
		"truncate":       &meta.SetAttr{Ino: seg.Ino, Mask: meta.SetSize | meta.SetMtimeNow},
		"fallocate":      &meta.Fallocate{Ino: seg.Ino, Len: 10},
		"copy range":     &meta.CopyRange{Src: foreign, Dst: seg.Ino, Len: 3},
		"create":         &meta.Create{Parent: p, Name: "new", Mode: meta.TypeRegular | 0o644},
		"mkdir":          &meta.Create{Parent: top, Name: "1", Mode: meta.TypeDir | 0o755},
		"symlink":        &meta.Create{Parent: p, Name: "sym", Mode: meta.TypeSymlink, Target: "x"},
		"mknod":          &meta.Create{Parent: p, Name: "fifo", Mode: meta.TypeFIFO | 0o644},
		"tmpfile":        &meta.Tmpfile{Parent: p, Mode: 0o600},
		"link":           &meta.Link{Ino: foreign, Parent: p, Name: "new"},
		"link a tmpfile": &meta.Link{Ino: temp, Parent: p, Name: "new"},
		"rename":         &meta.Rename{Parent: 1, Name: "foreign", NewParent: p, NewName: "seg"},
		"exchange":       &meta.Rename{Parent: p, Name: "seg", NewParent: 1, NewName: "foreign", Flags: meta.RenameExchange},
		"mark":           &meta.SetAttr{Ino: foreign, Mask: meta.SetStream},
	} {
		if _, err := f.try(op); meta.KindOf(err) != meta.NotPermitted {
			t.Errorf("DATA: %s: %v", name, err)
		}
	}
	if res, err := f.try(&meta.Create{Parent: p, Name: "seg", Mode: meta.TypeRegular | 0o644}); err != nil || !res.Existed {
		t.Errorf("O_CREAT of a name that exists: %v", err)
	}
	f.do(&meta.SetAttr{Ino: seg.Ino, Mask: meta.SetMode | meta.SetMtime, Mode: 0o600, Mtime: 7})
	f.do(&meta.SetXattr{Ino: p, Name: "user.a", Value: []byte("x")})
	f.do(&meta.Write{Ino: seg.Ino, MarkSynced: true})
	if d := f.do(&meta.Open{Ino: seg.Ino}).Data; string(d) != "abc" {
		t.Errorf("DATA: %q", d)
	}
	f.do(&meta.Rename{Parent: p, Name: "seg", NewParent: 1, NewName: "taken"})
	f.fails(meta.NotPermitted, write(seg.Ino))
	f.do(&meta.Rename{Parent: 1, Name: "log", NewParent: 1, NewName: "log2"})
	f.do(&meta.Unlink{Parent: 1, Name: "taken"})
	f.do(&meta.Unlink{Parent: p, Name: "link"})
	f.do(&meta.Unlink{Parent: top, Name: "0", Dir: true})
	f.do(&meta.Unlink{Parent: 1, Name: "log2", Dir: true})
}
