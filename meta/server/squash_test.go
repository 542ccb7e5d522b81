package server

import (
	"fmt"
	"testing"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/cluster"
	peering "penstock.io/penstock/meta/peer"
)

// TestSquashedClient: a client whose root is squashed speaks to the owner itself, without a
// kernel that checks anything. The client makes no file that would give its user another identity
// on another machine, and gives no file away; its users' rights stay.
func TestSquashedClient(t *testing.T) {
	t.Parallel()
	s := newSecured(t)
	s.grants(2,
		cluster.Grant{ID: 1, Who: "client/trusted", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAsIs},
		cluster.Grant{ID: 2, Who: "client/pod", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersNoRoot},
		cluster.Grant{ID: 3, Who: "client/one", Volume: 1, Rights: cluster.WriteRights, Users: cluster.UsersAllTo, UID: 5, GID: 6},
	)
	dial := func(name string) *client.Session {
		sess, err := client.Dial(t.Context(), client.Config{Addrs: []string{s.addr}, Name: name, Handler: &peer{leases: map[meta.Ino]meta.LeaseMode{}}, Creds: s.creds(peering.Client, name)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { sess.Close(t.Context()) })
		return sess
	}
	by := map[string]*client.Session{"trusted": dial("trusted"), "pod": dial("pod"), "one": dial("one")}
	n := uint64(0)
	do := func(who string, op meta.Op) (*meta.Result, error) {
		n++
		id := meta.OpID{}
		if op.Code().Mutates() {
			id = meta.OpID{Incarnation: 7, Unique: n}
		}
		return by[who].Do(t.Context(), 1, id, op, meta.LeaseNone)
	}
	must := func(who string, op meta.Op) meta.Attr {
		t.Helper()
		r, err := do(who, op)
		if err != nil {
			t.Fatalf("%s: %T: %v", who, op, err)
		}
		return r.Attr
	}
	const suid, sgid, both = meta.ModeSetUID, meta.ModeSetGID, meta.ModeSetUID | meta.ModeSetGID
	file := func(who string, mode, uid, gid uint32) meta.Ino {
		t.Helper()
		n++
		return must(who, &meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("f", n), Mode: meta.TypeRegular | mode, UID: uid, GID: gid}).Ino
	}
	mode := func(ino meta.Ino) uint32 { t.Helper(); return must("trusted", &meta.GetAttr{Ino: ino}).Mode & 0o7777 }
	refused := func(who, what string, op meta.Op) {
		t.Helper()
		if r, err := do(who, op); meta.KindOf(err) != meta.NotPermitted {
			t.Errorf("%s: %s: %+v, %v", who, what, r, err)
		}
	}

	// A trusted client makes all of these files.
	must("trusted", &meta.Create{Parent: meta.RootIno, Name: "disk", Mode: meta.TypeBlock | 0o600, Rdev: 0x801})
	shared := must("trusted", &meta.Create{Parent: meta.RootIno, Name: "shared", Mode: meta.TypeDir | sgid | 0o777}).Ino // group 0
	caps := file("trusted", 0o755, 0, 0)
	must("trusted", &meta.SetXattr{Ino: caps, Name: "security.capability", Value: []byte("all of them")})
	if m := mode(file("trusted", both|0o755, 0, 0)); m != both|0o755 {
		t.Fatalf("a set-id program has mode %#o: nothing is tested", m)
	}

	for _, who := range []string{"pod", "one"} {
		n++
		for what, typ := range map[string]uint32{"a block device": meta.TypeBlock, "a character device": meta.TypeChar} {
			refused(who, what, &meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("dev", n, typ), Mode: typ | 0o666, Rdev: 0x801})
		}
		must(who, &meta.Create{Parent: meta.RootIno, Name: fmt.Sprint("fifo", n), Mode: meta.TypeFIFO | 0o666})

		own := file(who, 0o755, 5, 6)
		for _, name := range []string{"security.capability", "security.selinux", "security.ima", "trusted.overlay.opaque"} {
			refused(who, name, &meta.SetXattr{Ino: own, Name: name, Value: []byte("x")})
			refused(who, "removing "+name, &meta.RemoveXattr{Ino: caps, Name: name})
		}
		must(who, &meta.SetXattr{Ino: own, Name: "user.x", Value: []byte("x")})

		// The client's own users may have set-id programs of their own.
		if a := must(who, &meta.SetAttr{Ino: own, Mask: meta.SetMode, Mode: both | 0o755}); a.Mode&both != both {
			t.Errorf("%s: its own set-id program has mode %#o", who, a.Mode)
		}
		// Others' programs don't become such.
		root := file("trusted", 0o755, 0, 0)
		refused(who, "set-user-id on root's file", &meta.SetAttr{Ino: root, Mask: meta.SetMode, Mode: suid | 0o755})
		refused(who, "set-group-id on root's file", &meta.SetAttr{Ino: root, Mask: meta.SetMode, Mode: sgid | 0o755})
		must(who, &meta.SetAttr{Ino: root, Mask: meta.SetMode, Mode: 0o750})
		// A directory of root's group gives its group to files, and not with the bit.
		n++
		a := must(who, &meta.Create{Parent: shared, Name: fmt.Sprint("in", n), Mode: meta.TypeRegular | both | 0o755, UID: 5, GID: 6})
		if a.GID != 0 || a.Mode&sgid != 0 {
			t.Errorf("%s: a file of group %d has mode %#o", who, a.GID, a.Mode)
		}
		r, err := do(who, &meta.Tmpfile{Parent: shared, Mode: both | 0o755, UID: 5, GID: 6})
		if err != nil || r.Attr.GID != 0 || r.Attr.Mode&sgid != 0 {
			t.Errorf("%s: a file without a name: %+v, %v", who, r, err)
		}
		refused(who, "set-group-id on it", &meta.SetAttr{Ino: a.Ino, Mask: meta.SetMode, Mode: sgid | 0o755})

		// Nothing is given away, and nothing taken.
		refused(who, "chown of its own file", &meta.SetAttr{Ino: file("trusted", 0o644, 7, 6), Mask: meta.SetUID, UID: 8})
		refused(who, "chown of root's file", &meta.SetAttr{Ino: root, Mask: meta.SetUID, UID: 5})
		refused(who, "chgrp of root's file", &meta.SetAttr{Ino: root, Mask: meta.SetGID, GID: 6})
		if a := must(who, &meta.SetAttr{Ino: file(who, sgid|0o755, 5, 6), Mask: meta.SetGID, GID: 9}); a.GID != 6 && a.Mode&sgid != 0 {
			t.Errorf("%s: given to group %d with mode %#o", who, a.GID, a.Mode)
		}

		// A set-id program loses its bits at every change, whoever the writer is by the client's
		// claim.
		for what, change := range map[string]func(ino meta.Ino) meta.Op{
			"a write":             func(ino meta.Ino) meta.Op { return &meta.Write{Ino: ino, Inline: true, Data: []byte("x"), Size: 1} },
			"a size":              func(ino meta.Ino) meta.Op { return &meta.SetAttr{Ino: ino, Mask: meta.SetSize, Size: 1 << 20} },
			"an allocation":       func(ino meta.Ino) meta.Op { return &meta.Fallocate{Ino: ino, Len: 1 << 20} },
			"a copy of something": func(ino meta.Ino) meta.Op { return &meta.CopyRange{Src: own, Dst: ino, Len: 0} },
			"a write and its mode": func(ino meta.Ino) meta.Op {
				return &meta.SetAttr{Ino: ino, Mask: meta.SetSize | meta.SetMode, Mode: both | 0o755}
			},
		} {
			program := file("trusted", both|0o755, 0, 0)
			must("trusted", &meta.SetXattr{Ino: program, Name: "security.capability", Value: []byte("all of them")})
			if _, err := do(who, change(program)); err != nil {
				t.Logf("%s: %s: %v", who, what, err)
			}
			_, err := do("trusted", &meta.GetXattr{Ino: program, Name: "security.capability"})
			if m := mode(program); m&both != 0 || meta.KindOf(err) != meta.NoAttribute {
				t.Errorf("DATA: %s: after %s root's program has mode %#o and capabilities: %v", who, what, m, err)
			}
		}
		// A program of the client's own user keeps its bits until the user's kernel clears the
		// bits.
		if must(who, &meta.Write{Ino: own, Inline: true, Data: []byte("x"), Size: 1}); mode(own)&both != both {
			t.Errorf("%s: its own program has mode %#o after it was committed", who, mode(own))
		}
	}
}
