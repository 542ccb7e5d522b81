package local

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
)

// founding is an etcd in which one cluster after another is made.
type founding struct {
	*testing.T
	etcd *embedded.Server
}

func newFounding(t *testing.T) *founding {
	t.Helper()
	s, err := embedded.Start(embedded.Config{Dir: filepath.Join(t.TempDir(), "etcd")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return &founding{t, s}
}

// begin forgets every cluster and returns the parts to make the next cluster.
func (f *founding) begin() FoundConfig {
	f.Helper()
	if _, err := f.etcd.Client().Delete(f.Context(), "/penstock/", clientv3.WithPrefix()); err != nil {
		f.Fatal(err)
	}
	return FoundConfig{Etcd: []string{f.etcd.Endpoint()}, Credentials: filepath.Join(f.TempDir(), "cred"), Meta: "m1", Life: time.Hour, Logger: slog.New(slog.DiscardHandler)}
}

type killed string

// until makes a cluster, and ends at a step.
func (f *founding) until(cfg FoundConfig, step string) {
	f.Helper()
	cfg.step = func(s string) {
		if s == step {
			panic(killed(s))
		}
	}
	defer func() {
		if k, is := recover().(killed); !is || string(k) != step {
			f.Fatalf("step %q did not come: %v", step, k)
		}
	}()
	_, err := Found(f.Context(), cfg)
	f.Fatal(err)
}

// whole demands a usable cluster: etcd's authority opens with the written key, and both
// certificates are signed by the authority and on the list.
func (f *founding) whole(cfg FoundConfig, id string) {
	f.Helper()
	c, err := cluster.Open(f.Context(), f.etcd.Client(), cluster.Config{Expect: id})
	if err != nil {
		f.Fatal(err)
	}
	defer c.Close()
	sealed, err := c.Authority(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	first, err := peer.Load(filepath.Join(cfg.Credentials, "meta"), nil)
	if err != nil {
		f.Fatal(err)
	}
	key, err := first.ClusterKey()
	if err != nil {
		f.Fatal(err)
	}
	a, err := sealed.Open(key)
	if err != nil {
		f.Fatal(err)
	}
	admin, err := peer.Load(filepath.Join(cfg.Credentials, "admin"), nil)
	if err != nil {
		f.Fatal(err)
	}
	for _, creds := range []*peer.Credentials{first, admin} {
		who := creds.Identity()
		if who.Cluster != id || time.Now().After(who.Expires) {
			f.Errorf("%s is of cluster %s until %v", who, who.Cluster, who.Expires)
		}
		key, request, err := peer.NewKey()
		if err != nil {
			f.Fatal(err)
		}
		chain, err := a.Sign(who, request)
		if err == nil {
			err = creds.Replace(key, chain) // refuses certificates of another authority
		}
		if err != nil {
			f.Errorf("%s: %v", who, err)
		}
	}
	members, err := c.Members(f.Context())
	if got := fmt.Sprint(members); err != nil || len(members) != 2 {
		f.Errorf("members %s, %v", got, err)
	}
	if _, err := os.Lstat(cfg.Credentials + notYet); !errors.Is(err, fs.ErrNotExist) {
		f.Errorf("left behind: %v", err)
	}
}

// TestFoundIsKilled: a process that is killed while making a cluster makes the cluster at the
// next start, wherever the kill came; and never a second cluster.
func TestFoundIsKilled(t *testing.T) {
	f := newFounding(t)
	for _, step := range []string{"staged", "made", "enrolled meta", "enrolled admin"} {
		cfg := f.begin()
		f.until(cfg, step)
		if _, err := os.Lstat(cfg.Credentials); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: the credentials of a cluster that is not whole are in place", step)
		}
		id, err := Found(t.Context(), cfg)
		if err != nil {
			t.Fatalf("after %q: %v", step, err)
		}
		f.whole(cfg, id)
		if _, err := Found(t.Context(), cfg); meta.KindOf(err) != meta.Exists {
			t.Errorf("made again: %v", err)
		}
		cfg.Credentials += "-2"
		if _, err := Found(t.Context(), cfg); meta.KindOf(err) != meta.Exists {
			t.Errorf("made elsewhere: %v", err)
		}
		if _, err := os.Lstat(cfg.Credentials + notYet); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("keys of no cluster are left: %v", err)
		}
	}
}

// TestFoundIsKilledWriting: after any of the files that the process writes first.
func TestFoundIsKilledWriting(t *testing.T) {
	f := newFounding(t)
	files := []string{"meta/cluster.key", "meta/ca.pem", "meta/identity.pem", "meta/authority.sealed", "admin/ca.pem", "admin/identity.pem"}
	for n := range len(files) + 1 {
		cfg := f.begin()
		f.until(cfg, "staged")
		staged := cfg.Credentials + notYet
		for _, name := range files[n:] {
			if err := os.Remove(filepath.Join(staged, name)); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(staged, "meta", ".ca.pem.123"), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
		id, err := Found(t.Context(), cfg)
		if err != nil {
			t.Fatalf("after %d files: %v", n, err)
		}
		f.whole(cfg, id)
	}
}

// TestFoundGoesOnLate: the certificates written before the kill have ended at the next start.
func TestFoundGoesOnLate(t *testing.T) {
	f := newFounding(t)
	cfg := f.begin()
	cfg.Life = time.Second
	f.until(cfg, "made")
	staged, err := peer.Load(filepath.Join(cfg.Credentials+notYet, "admin"), nil)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(1100 * time.Millisecond) // certificates tell whole seconds by the wall's clock
	id, err := Found(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	admin, err := peer.Load(filepath.Join(cfg.Credentials, "admin"), nil)
	if err != nil || admin.Identity().Cluster != id || !admin.Identity().Begins.After(staged.Identity().Begins) {
		t.Errorf("the administrator's certificate is of %v, as it was staged %v: %v", admin.Identity().Begins, staged.Identity().Begins, err)
	}
}

// TestFoundOther: staged files are never another process's, and no two processes make a cluster
// at once.
func TestFoundOther(t *testing.T) {
	f := newFounding(t)
	cfg := f.begin()
	f.until(cfg, "staged")
	other := cfg
	other.Meta = "m2"
	if _, err := Found(t.Context(), other); meta.KindOf(err) != meta.Invalid {
		t.Errorf("under another name: %v", err)
	}
	unlock, err := lockParent(cfg.Credentials)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Found(t.Context(), cfg); meta.KindOf(err) != meta.Busy {
		t.Errorf("two at once: %v", err)
	}
	unlock()
	// Somebody else makes a cluster meanwhile.
	elsewhere := cfg
	elsewhere.Credentials = filepath.Join(t.TempDir(), "cred")
	id, err := Found(t.Context(), elsewhere)
	if err != nil {
		t.Fatal(err)
	}
	f.whole(elsewhere, id)
	if _, err := Found(t.Context(), cfg); meta.KindOf(err) != meta.Exists {
		t.Errorf("over another cluster: %v", err)
	}
	if _, err := os.Lstat(cfg.Credentials); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("credentials of no cluster: %v", err)
	}
}

// An existing empty directory, as systemd-tmpfiles makes directories, is used, and keeps its
// owner: the servers' user must get in.
func TestFoundInAnEmptyDirectory(t *testing.T) {
	f := newFounding(t)
	cfg := f.begin()
	if err := errors.Join(os.Mkdir(cfg.Credentials, 0o700), os.Chmod(cfg.Credentials, 0o710), os.Chown(cfg.Credentials, 61234, 61235)); err != nil {
		t.Fatal(err)
	}
	id, err := Found(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.whole(cfg, id)
	var st unix.Stat_t
	if err := unix.Stat(cfg.Credentials, &st); err != nil || st.Uid != 61234 || st.Gid != 61235 || st.Mode&0o7777 != 0o710 {
		t.Errorf("it is %d:%d %o, %v", st.Uid, st.Gid, st.Mode, err)
	}
	if _, err := Found(t.Context(), cfg); meta.KindOf(err) != meta.Exists {
		t.Errorf("made again: %v", err)
	}
}
