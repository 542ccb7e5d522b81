package stream

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"penstock.io/penstock/meta"
)

func TestUsers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.json")
	if _, err := OpenUsers(file); !errors.Is(err, meta.NotFound) {
		t.Errorf("a missing file: %v", err)
	}
	for _, name := range []string{"ann", "bob@example.org"} {
		if err := SetUser(file, name, "first", &User{UID: 1000, GIDs: []uint32{1000, 4}}); err != nil {
			t.Fatal(err)
		}
	}
	u, err := OpenUsers(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := SetUser(file, "ann", "second", nil); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second time, right passwords were right before
		for _, c := range []struct {
			name, password string
			want           meta.Kind
		}{
			{"ann", "second", 0}, {"ann", "first", meta.AccessDenied}, {"ann", "", meta.AccessDenied}, {"bob@example.org", "first", 0},
			{"eve", "first", meta.AccessDenied}, {"", "", meta.AccessDenied}, {"ann", strings.Repeat("x", 1<<20), meta.AccessDenied},
		} {
			l, err := u.Check(t.Context(), c.name, c.password)
			if meta.KindOf(err) != c.want {
				t.Errorf("%s with %.10q: %v", c.name, c.password, err)
			}
			if err != nil {
				continue
			}
			if who, err := l.User(); err != nil || who.UID != 1000 || len(who.GIDs) != 2 {
				t.Errorf("%s: %+v, %v", c.name, who, err)
			}
		}
	}
	for _, m := range Mechanisms {
		a, err := u.Secret(m, "eve")
		b, berr := u.Secret(m, "eve")
		if err != nil || berr != nil || string(a.StoredKey) != string(b.StoredKey) || a.KeyFactors != b.KeyFactors || a.Iters != iterations || len(a.Salt) != 16 {
			t.Errorf("a name that no user has: %+v, %+v, %v, %v", a, b, err, berr)
		}
	}
	for _, bad := range [][2]string{{"", "x"}, {"a b", "x"}, {"new", "x"}, {"ann", "é"}, {"ann", strings.Repeat("x", maxPassword+1)}} {
		if err := SetUser(file, bad[0], bad[1], nil); !errors.Is(err, meta.Invalid) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil || strings.Contains(string(b), "second") {
		t.Errorf("the file is %s, %v", b, err)
	}
	if err := os.Chmod(file, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Check(t.Context(), "ann", "second"); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("a file that everybody may read: %v", err)
	}
}

// TestExposed: a file of users is for the process's user alone. Root may give the file to the
// process's group, as Kubernetes does.
func TestExposed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.json")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	const id, other = 65532, 1000
	for _, c := range []struct {
		owner, group int
		mode         os.FileMode
		process      uint32 // user and group
		exposed      bool
	}{
		{id, id, 0o600, id, false}, {id, id, 0o640, id, true}, {id, id, 0o604, id, true},
		{0, id, 0o440, id, false}, {0, id, 0o640, id, false}, {0, id, 0o460, id, true}, {0, id, 0o444, id, true},
		{0, other, 0o440, id, true}, {other, id, 0o440, id, true}, {0, 0, 0o440, 0, true}, {0, 0, 0o600, 0, false},
	} {
		if err := errors.Join(os.Chown(file, c.owner, c.group), os.Chmod(file, c.mode)); err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if got := exposed(info, c.process, c.process); got != c.exposed {
			t.Errorf("mode %04o of %d:%d is exposed to others than %d: %v", c.mode, c.owner, c.group, c.process, got)
		}
	}
}

// TestLoginEnds: a login ends when the user gets another password or is removed, and goes on
// when only the ids change, or the file can't be read for a moment.
func TestLoginEnds(t *testing.T) {
	file := filepath.Join(t.TempDir(), "users.json")
	set := func(password string, uid uint32) {
		t.Helper()
		if err := SetUser(file, "ann", password, &User{UID: uid, GIDs: []uint32{7}}); err != nil {
			t.Fatal(err)
		}
	}
	set("first", 1000)
	u, err := OpenUsers(file)
	if err != nil {
		t.Fatal(err)
	}
	l, err := u.Check(t.Context(), "ann", "first")
	if err != nil {
		t.Fatal(err)
	}
	set("", 1001)
	if who, err := l.User(); err != nil || who.UID != 1001 {
		t.Errorf("after a change of the ids: %+v, %v", who, err)
	}
	if err := os.Rename(file, file+".away"); err != nil {
		t.Fatal(err)
	}
	if _, err := l.User(); err != nil {
		t.Errorf("while the file is away for a moment: %v", err)
	}
	u.good = u.good.Add(-2 * usersGrace)
	if _, err := l.User(); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("while the file is away for long: %v", err)
	}
	if err := os.Rename(file+".away", file); err != nil {
		t.Fatal(err)
	}
	set("second", 1001)
	if _, err := l.User(); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("after a change of the password: %v", err)
	}
	if _, err := u.Check(t.Context(), "ann", "first"); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("the former password: %v", err)
	}
	if l, err = u.Check(t.Context(), "ann", "second"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(`{"version":2,"users":{}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := l.User(); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("after the removal of the user: %v", err)
	}
}

func FuzzUsers(f *testing.F) {
	f.Add([]byte(`{"version":2,"users":{"ann":{"uid":1,"gids":[1],"secrets":{"SCRAM-SHA-256":{"iterations":4096,"salt":"AAAAAAAAAAA=","stored_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","server_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}}}}}`))
	f.Add([]byte(`{"version":2,"users":{"ann":{"gids":[1]}}}`))
	f.Add([]byte(`{"version":2,"users":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeUsers("users.json", b)
		if err != nil {
			return
		}
		if r.Version != usersVersion || r.Users == nil {
			t.Errorf("%+v", r)
		}
		for name, e := range r.Users {
			if e.UID == nil || len(e.GIDs) == 0 {
				t.Errorf("%s has no ids", name) // a missing uid must not be taken for 0
			}
		}
	})
}
