package namespace

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strings"
	"testing"
	"time"

	"penstock.io/penstock/meta"
)

func TestXattrs(t *testing.T) {
	f := newFixture(t)
	ino, fifo := f.file("f"), f.create(1, "p", meta.TypeFIFO).Ino
	for _, c := range []struct {
		ino         meta.Ino
		name, value string
		flags       uint32
		want        meta.Kind
	}{
		{ino, "user.a", "1", 0, 0}, {ino, "user.a", "2", meta.XattrCreate, meta.Exists}, {ino, "user.a", "2", meta.XattrReplace, 0},
		{ino, "user.b", "2", meta.XattrReplace, meta.NoAttribute}, {ino, "user.b", "", meta.XattrCreate, 0},
		{ino, "user.c", "2", meta.XattrReplace | meta.XattrCreate, meta.NoAttribute}, {ino, "user.c", "2", 4, meta.Invalid},
		{ino, "trusted.t", "x", 0, 0}, {ino, "security.s", "x", 0, 0}, {ino, "user.", "x", 0, meta.Invalid}, {ino, "user", "x", 0, meta.NotSupported},
		{ino, "system.other", "x", 0, meta.NotSupported}, {ino, "", "x", 0, meta.Range}, {ino, "user." + strings.Repeat("n", 250), "x", 0, 0},
		{ino, "user." + strings.Repeat("n", 251), "x", 0, meta.Range}, {ino, "user.nul\x00", "x", 0, meta.Invalid},
		{ino, "user.big", strings.Repeat("v", meta.MaxXattrVal), 0, 0}, {ino, "user.big", strings.Repeat("v", meta.MaxXattrVal+1), 0, meta.TooBig},
		{fifo, "user.a", "x", 0, meta.NotPermitted}, {fifo, "trusted.a", "x", 0, 0}, {fifo, "security.a", "x", 0, 0}, {99, "user.a", "x", 0, meta.Stale},
	} {
		if _, err := f.try(&meta.SetXattr{Ino: c.ino, Name: c.name, Value: []byte(c.value), Flags: c.flags}); meta.KindOf(err) != c.want {
			t.Errorf("set %.30q flags %d: %v, want %v", c.name, c.flags, err, c.want)
		}
	}
	list := string(f.do(&meta.ListXattr{Ino: ino}).Data)
	if want := "security.s\x00trusted.t\x00user.a\x00user.b\x00user.big\x00user." + strings.Repeat("n", 250) + "\x00"; list != want {
		t.Errorf("list %q", list)
	}
	if v := f.do(&meta.GetXattr{Ino: ino, Name: "user.a"}).Data; string(v) != "2" {
		t.Errorf("%q", v)
	}
	if v := f.do(&meta.GetXattr{Ino: ino, Name: "user.b"}).Data; v == nil || len(v) != 0 {
		t.Errorf("%q", v)
	}
	f.fails(meta.NoAttribute, &meta.GetXattr{Ino: ino, Name: "user.none"})
	f.fails(meta.NoAttribute, &meta.GetXattr{Ino: fifo, Name: "user.a"})
	f.fails(meta.NotSupported, &meta.GetXattr{Ino: ino, Name: "bogus.a"})
	f.fails(meta.NoAttribute, &meta.RemoveXattr{Ino: ino, Name: "user.none"})
	a := f.do(&meta.RemoveXattr{Ino: ino, Name: "user.a"}).Attr
	if a.Ctime != f.now || a.Mtime == f.now || a.Flags != meta.FlagHasXattrs {
		t.Errorf("%+v", a)
	}
	for _, name := range strings.Split(strings.TrimSuffix(string(f.do(&meta.ListXattr{Ino: ino}).Data), "\x00"), "\x00") {
		f.do(&meta.RemoveXattr{Ino: ino, Name: name})
	}
	if a := f.attr(ino); a.Flags != 0 {
		t.Errorf("%+v", a)
	}
	// The list has a bound.
	f.fails(meta.NoSpace, func() meta.Op {
		for i := 0; ; i++ {
			op := &meta.SetXattr{Ino: ino, Name: fmt.Sprintf("user.%0249d", i)}
			if len(f.do(&meta.ListXattr{Ino: ino}).Data)+len(op.Name)+1 > meta.MaxXattrs {
				return op
			}
			f.do(op)
		}
	}())
	// Attributes go with their inode.
	f.do(&meta.Unlink{Parent: 1, Name: "f"})
	f.do(&meta.ReleaseOrphans{Inos: []meta.Ino{ino}})
}

// ---- ACLs

// mkACL writes an ACL as getfacl -n prints it: "u::rwx,u:5:r,g::x,m::rw,o::".
func mkACL(t testing.TB, s string) []byte {
	t.Helper()
	b := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range strings.Split(s, ",") {
		p := strings.Split(e, ":")
		tag := map[string]uint16{"u": 1, "g": 4, "m": 16, "o": 32}[p[0]]
		id := uint32(1<<32 - 1)
		if p[1] != "" {
			tag *= 2
			if _, err := fmt.Sscan(p[1], &id); err != nil {
				t.Fatal(err)
			}
		}
		var perm uint16
		for _, c := range p[2] {
			perm |= map[rune]uint16{'r': 4, 'w': 2, 'x': 1}[c]
		}
		b = binary.LittleEndian.AppendUint16(b, tag)
		b = binary.LittleEndian.AppendUint16(b, perm)
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return b
}

func (f *fixture) acl(ino meta.Ino, name string) []byte {
	f.t.Helper()
	res, err := f.try(&meta.GetXattr{Ino: ino, Name: name})
	if meta.KindOf(err) == meta.NoAttribute {
		return nil
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return res.Data
}

func TestSetACL(t *testing.T) {
	for _, c := range []struct {
		acl   string
		mode  uint32
		keeps bool
	}{
		{"u::rwx,g::rx,o::x", 0o751, false},
		{"u::rw,u:5:rwx,g::r,m::rx,o::", 0o650, true},
		{"u::rw,g::rwx,g:7:r,m::r,o::r", 0o644, true},
		{"u::rw,g::rwx,m::r,o::r", 0o644, true},
	} {
		f := newFixture(t)
		ino := f.file("f")
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o2777})
		b := mkACL(t, c.acl)
		a := f.do(&meta.SetXattr{Ino: ino, Name: xattrAccessACL, Value: b}).Attr
		if a.Mode != reg|0o2000|c.mode || (a.Flags&meta.FlagHasACL != 0) != c.keeps || a.Ctime != f.now {
			t.Errorf("%s: %+v", c.acl, a)
		}
		if got := f.acl(ino, xattrAccessACL); c.keeps && !bytes.Equal(got, b) || !c.keeps && got != nil {
			t.Errorf("%s: stored %x", c.acl, got)
		}
		if a := f.do(&meta.SetXattr{Ino: ino, Name: xattrAccessACL, Value: b, KillSGID: true}).Attr; a.Mode != reg|c.mode {
			t.Errorf("%s: %o with the group bit to be dropped", c.acl, a.Mode)
		}
		f.do(&meta.RemoveXattr{Ino: ino, Name: xattrAccessACL})
		f.do(&meta.RemoveXattr{Ino: ino, Name: xattrAccessACL}) // succeeds on ext4, too
		f.do(&meta.SetXattr{Ino: ino, Name: xattrAccessACL})
		if a := f.attr(ino); a.Mode != reg|c.mode || a.Flags != 0 || c.keeps && a.Ctime != f.now-2 {
			t.Errorf("%s: after removal %+v", c.acl, a)
		}
	}
}

func TestBadACLs(t *testing.T) {
	f := newFixture(t)
	ino, d := f.file("f"), f.mkdir(1, "d")
	l := f.do(&meta.Create{Parent: 1, Name: "l", Mode: meta.TypeSymlink, Target: "x"}).Attr.Ino
	good := mkACL(t, "u::rw,u:5:r,g::r,m::r,o::r")
	for _, c := range []struct {
		name string
		ino  meta.Ino
		attr string
		val  []byte
		want meta.Kind
	}{
		{"no owner", ino, xattrAccessACL, mkACL(t, "g::r,o::r"), meta.Invalid},
		{"no others", ino, xattrAccessACL, mkACL(t, "u::r,g::r"), meta.Invalid},
		{"no mask", ino, xattrAccessACL, mkACL(t, "u::r,u:5:r,g::r,o::r"), meta.Invalid},
		{"no mask for a group", ino, xattrAccessACL, mkACL(t, "u::r,g::r,g:5:r,o::r"), meta.Invalid},
		{"out of order", ino, xattrAccessACL, mkACL(t, "g::r,u::r,o::r"), meta.Invalid},
		{"two owners", ino, xattrAccessACL, mkACL(t, "u::r,u::r,g::r,o::r"), meta.Invalid},
		{"more behind the end", ino, xattrAccessACL, mkACL(t, "u::r,g::r,o::r,o::r"), meta.Invalid},
		{"nobody named", ino, xattrAccessACL, mkACL(t, "u::rw,u:4294967295:r,g::r,m::r,o::r"), meta.Invalid},
		{"cut", ino, xattrAccessACL, good[:len(good)-1], meta.Invalid},
		{"no header", ino, xattrAccessACL, good[:3], meta.Invalid},
		{"version 1", ino, xattrAccessACL, append([]byte{1}, good[1:]...), meta.NotSupported},
		{"permission 8", ino, xattrAccessACL, func() []byte { b := bytes.Clone(good); b[6] = 8; return b }(), meta.Invalid},
		{"unknown tag", ino, xattrAccessACL, func() []byte { b := bytes.Clone(good); b[4] = 64; return b }(), meta.Invalid},
		{"default on a file", ino, xattrDefaultACL, good, meta.AccessDenied},
		{"no default on a file", ino, xattrDefaultACL, nil, 0},
		{"on a link", l, xattrAccessACL, good, meta.NotSupported},
		{"empty", ino, xattrAccessACL, good[:4], 0},
		{"default on a directory", d, xattrDefaultACL, good, 0},
		{"default removed by an empty one", d, xattrDefaultACL, nil, 0},
	} {
		if _, err := f.try(&meta.SetXattr{Ino: c.ino, Name: c.attr, Value: c.val}); meta.KindOf(err) != c.want {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	if a := f.attr(d); a.Flags != 0 || a.Mode != dir|0o755 {
		t.Errorf("%+v", a)
	}
}

func TestChmodKeepsACL(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	f.do(&meta.SetXattr{Ino: ino, Name: xattrAccessACL, Value: mkACL(t, "u::rw,u:5:rwx,g::r,m::rx,o::")})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o731})
	if got, want := f.acl(ino, xattrAccessACL), mkACL(t, "u::rwx,u:5:rwx,g::r,m::wx,o::x"); !bytes.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
	// Without a mask the owning group's entry follows.
	d := f.mkdir(1, "d")
	f.do(&meta.SetXattr{Ino: d, Name: xattrDefaultACL, Value: mkACL(t, "u::rwx,g::r,o::")})
	f.do(&meta.SetAttr{Ino: d, Mask: meta.SetMode, Mode: 0o700})
	if got := f.acl(d, xattrDefaultACL); !bytes.Equal(got, mkACL(t, "u::rwx,g::r,o::")) {
		t.Errorf("the default ACL changed: %x", got)
	}
}

// TestInheritACL: the ACL and mode that a new inode gets from its directory's default ACL
// and the mode of the create; the umask counts only without a default ACL.
func TestInheritACL(t *testing.T) {
	for _, c := range []struct {
		def  string
		mode uint32
		want uint32
		acl  string // "" if the mode is enough
	}{
		{"u::rwx,g::rx,o::rx", 0o666, 0o644, ""},
		{"u::rwx,g::rwx,o::rwx", 0o640, 0o640, ""},
		{"u::rw,u:5:rwx,g::rx,m::rwx,o::r", 0o777, 0o674, "u::rw,u:5:rwx,g::rx,m::rwx,o::r"},
		{"u::rwx,u:5:rwx,g::rx,m::rwx,o::r", 0o640, 0o640, "u::rw,u:5:rwx,g::rx,m::r,o::"},
		{"u::rwx,g::rx,g:9:rw,m::rw,o::", 0o666, 0o660, "u::rw,g::rx,g:9:rw,m::rw,o::"},
	} {
		f := newFixture(t)
		d := f.mkdir(1, "d")
		f.do(&meta.SetXattr{Ino: d, Name: xattrDefaultACL, Value: mkACL(t, c.def)})
		if f.attr(d).Flags != meta.FlagHasXattrs|meta.FlagHasACL {
			t.Error("flags")
		}
		var want []byte
		if c.acl != "" {
			want = mkACL(t, c.acl)
		}
		a := f.do(&meta.Create{Parent: d, Name: "f", Mode: reg | c.mode, Umask: 0o777}).Attr
		if got := f.acl(a.Ino, xattrAccessACL); a.Mode != reg|c.want || !bytes.Equal(got, want) || f.acl(a.Ino, xattrDefaultACL) != nil {
			t.Errorf("%s, file %o: mode %o, ACL %x, want %x", c.def, c.mode, a.Mode, got, want)
		}
		a = f.do(&meta.Create{Parent: d, Name: "d", Mode: dir | c.mode, Umask: 0o777}).Attr
		if got := f.acl(a.Ino, xattrAccessACL); a.Mode != dir|c.want || !bytes.Equal(got, want) || !bytes.Equal(f.acl(a.Ino, xattrDefaultACL), mkACL(t, c.def)) {
			t.Errorf("%s, directory %o: mode %o, ACL %x, want %x", c.def, c.mode, a.Mode, got, want)
		}
		a = f.do(&meta.Tmpfile{Parent: d, Mode: c.mode, Umask: 0o777}).Attr
		if got := f.acl(a.Ino, xattrAccessACL); a.Mode != reg|c.want || !bytes.Equal(got, want) {
			t.Errorf("%s, temporary file %o: mode %o, ACL %x", c.def, c.mode, a.Mode, got)
		}
		if a := f.do(&meta.Create{Parent: d, Name: "l", Mode: meta.TypeSymlink, Target: "x"}).Attr; a.Mode != meta.TypeSymlink|0o777 || a.Flags != 0 {
			t.Errorf("link %+v", a)
		}
		f.check()
	}
}

// TestReadTime: a read changes no ctime, also if the reporting client knows an older
// ctime. The access time is recorded by Linux's rules, once and not for every reader.
func TestReadTime(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o600})
	was := f.attr(ino)
	tell := func(at, ctime meta.Time, want meta.Attr) {
		t.Helper()
		got := f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetAtime | meta.SetCtime, Atime: at, Ctime: ctime}).Attr
		if got != want || f.attr(ino) != want {
			t.Errorf("DATA: after a read at %v it is\n%+v, not\n%+v", at, f.attr(ino), want)
		}
	}
	tell(was.Atime, was.Ctime, was)
	want := was
	want.Atime, want.Change = was.Ctime+10, was.Change+1
	tell(want.Atime, was.Ctime-5, want)
	tell(want.Atime+7, was.Ctime, want) // another reader's
	tell(want.Atime-3, was.Ctime, want)
	day := meta.Time(24 * time.Hour)
	tell(want.Atime+day-1, was.Ctime, want)
	want.Atime, want.Change = want.Atime+day, want.Change+1
	tell(want.Atime, was.Ctime, want)
}

func TestSetAttr(t *testing.T) {
	f := newFixture(t)
	ino := f.file("f")
	base := f.attr(ino)
	type change func(a *meta.Attr)
	for _, c := range []struct {
		name string
		op   meta.SetAttr
		want change
	}{
		{"nothing", meta.SetAttr{}, func(a *meta.Attr) { a.Ctime = base.Ctime; a.Change = base.Change }},
		{"mode", meta.SetAttr{Mask: meta.SetMode, Mode: 0o17777}, func(a *meta.Attr) { a.Mode = reg | 0o7777 }},
		{"type stays", meta.SetAttr{Mask: meta.SetMode, Mode: dir | 0o600}, func(a *meta.Attr) { a.Mode = reg | 0o600 }},
		{"owner", meta.SetAttr{Mask: meta.SetUID, UID: 9, GID: 8}, func(a *meta.Attr) { a.UID = 9 }},
		{"group", meta.SetAttr{Mask: meta.SetGID, UID: 9, GID: 8}, func(a *meta.Attr) { a.GID = 8 }},
		{"atime", meta.SetAttr{Mask: meta.SetAtime, Atime: -5, Mtime: 7}, func(a *meta.Attr) { a.Atime = -5 }},
		{"mtime", meta.SetAttr{Mask: meta.SetMtime, Atime: -5, Mtime: 1<<63 - 1}, func(a *meta.Attr) { a.Mtime = 1<<63 - 1 }},
		{"both now", meta.SetAttr{Mask: meta.SetAtimeNow | meta.SetMtimeNow}, func(a *meta.Attr) { a.Atime, a.Mtime = a.Ctime, a.Ctime }},
		{"ctime as told", meta.SetAttr{Mask: meta.SetMode | meta.SetCtime, Mode: 0o600, Ctime: 2}, func(a *meta.Attr) { a.Mode, a.Ctime = reg|0o600, 2 }},
		{"truncate with a time", meta.SetAttr{Mask: meta.SetSize | meta.SetMtime, Size: 10, Mtime: 3}, func(a *meta.Attr) { a.Size, a.Mtime = 10, 3 }},
	} {
		f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode | meta.SetUID | meta.SetGID | meta.SetSize | meta.SetAtime | meta.SetMtime | meta.SetCtime, Mode: 0o644, Atime: base.Atime, Mtime: base.Mtime, Ctime: base.Ctime})
		base.Change = f.attr(ino).Change
		c.op.Ino = ino
		got := f.do(&c.op).Attr
		want := base
		want.Ctime = f.now
		want.Change++
		c.want(&want)
		if got != want || f.attr(ino) != want {
			t.Errorf("%s\n got %+v\nwant %+v", c.name, got, want)
		}
	}
	// Changing the owner drops set-id bits as the client asks, and capabilities;
	// a directory keeps its bits.
	f.do(&meta.SetXattr{Ino: ino, Name: xattrCaps, Value: []byte("c")})
	f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetMode, Mode: 0o6711})
	if a := f.do(&meta.SetAttr{Ino: ino, Mask: meta.SetUID | meta.SetKillPriv, UID: 4}).Attr; a.Mode != reg|0o711 || a.Flags != 0 || a.UID != 4 {
		t.Errorf("%+v", a)
	}
	d := f.mkdir(1, "d")
	f.do(&meta.SetAttr{Ino: d, Mask: meta.SetMode, Mode: 0o6777})
	if a := f.do(&meta.SetAttr{Ino: d, Mask: meta.SetUID | meta.SetKillPriv, UID: 4}).Attr; a.Mode != dir|0o6777 {
		t.Errorf("%+v", a)
	}
	f.fails(meta.Stale, &meta.SetAttr{Ino: 99, Mask: meta.SetMode})
}
