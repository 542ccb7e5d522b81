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
		if err := SetPassword(file, name, "first"); err != nil {
			t.Fatal(err)
		}
	}
	u, err := OpenUsers(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := SetPassword(file, "ann", "second"); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, password string
		want           meta.Kind
	}{
		{"ann", "second", 0}, {"ann", "first", meta.AccessDenied}, {"ann", "", meta.AccessDenied}, {"bob@example.org", "first", 0},
		{"eve", "first", meta.AccessDenied}, {"", "", meta.AccessDenied}, {"ann", strings.Repeat("x", 1<<20), meta.AccessDenied},
	} {
		if err := u.Check(c.name, c.password); meta.KindOf(err) != c.want {
			t.Errorf("%s with %.10q: %v", c.name, c.password, err)
		}
	}
	for _, m := range Mechanisms {
		a, err := u.Secret(m, "eve")
		b, berr := u.Secret(m, "eve")
		if err != nil || berr != nil || string(a.StoredKey) != string(b.StoredKey) || a.KeyFactors != b.KeyFactors || a.Iters != iterations || len(a.Salt) != 16 {
			t.Errorf("a name that no user has: %+v, %+v, %v, %v", a, b, err, berr)
		}
	}
	for _, bad := range [][2]string{{"", "x"}, {"a b", "x"}, {"ann", ""}, {"ann", "é"}, {"ann", strings.Repeat("x", maxPassword+1)}} {
		if err := SetPassword(file, bad[0], bad[1]); !errors.Is(err, meta.Invalid) {
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
	if err := u.Check("ann", "second"); !errors.Is(err, meta.AccessDenied) {
		t.Errorf("a file that everybody may read: %v", err)
	}
}

func FuzzUsers(f *testing.F) {
	f.Add([]byte(`{"version":1,"users":{"ann":{"SCRAM-SHA-256":{"iterations":4096,"salt":"AAAAAAAAAAA=","stored_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=","server_key":"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="}}}}`))
	f.Add([]byte(`{"version":2,"users":{}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeUsers("users.json", b)
		if err == nil && (r.Version != usersVersion || r.Users == nil) {
			t.Errorf("%+v", r)
		}
	})
}
