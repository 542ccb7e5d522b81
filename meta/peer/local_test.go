package peer

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	"penstock.io/penstock/meta"
)

func TestDialLocal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	nc, err := DialLocal(t.Context(), "unix:"+path)
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	for _, addr := range []string{"unix:" + path + "x", "unix:s", "", "127.0.0.1:1"} {
		if _, err := DialLocal(t.Context(), addr); meta.KindOf(err) != meta.Unavailable {
			t.Errorf("%q: %v", addr, err)
		}
	}
}

// A user's socket is believed where root gave the user the directory.
func TestEntrusted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Log("only root can give directories away: without root nobody else is believed at all")
		return
	}
	const user, other = 4242, 4243
	top, err := os.MkdirTemp("/run", "penstock-entrusted-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	dir := filepath.Join(top, "theirs")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		name             string
		topUID, uid      int
		topMode, dirMode os.FileMode
		ok               bool
	}{
		{"given by root", 0, user, 0o755, 0o750, true},
		{"another's", 0, other, 0o755, 0o750, false},
		{"below another's", other, user, 0o755, 0o750, false},
		{"anybody may write", 0, user, 0o755, 0o757, false},
		{"the group may write", 0, user, 0o755, 0o770, false},
		{"anybody may write above", 0, user, 0o777 | os.ModeSticky, 0o750, false},
	} {
		for _, e := range []error{os.Chown(top, x.topUID, 0), os.Chmod(top, x.topMode), os.Chown(dir, x.uid, 0), os.Chmod(dir, x.dirMode)} {
			if e != nil {
				t.Fatal(e)
			}
		}
		if err := entrusted(dir, user); (err == nil) != x.ok {
			t.Errorf("%s: %v", x.name, err)
		}
	}
	link := filepath.Join(top, "link")
	if err := os.Symlink(dir, link); err != nil {
		t.Fatal(err)
	}
	os.Chown(top, 0, 0)
	os.Chmod(top, 0o755)
	os.Chmod(dir, 0o750)
	if entrusted(link, user) == nil {
		t.Error("a link is followed")
	}
}
