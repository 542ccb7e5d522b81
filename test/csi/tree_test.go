package csi

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"strings"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/wire"
)

// tree is an administrator's session, to look at the tree that workstations see.
type tree struct {
	r *rig
	*client.Session
}

// holdsNothing is the handler of a session without a cache.
type holdsNothing struct{}

func (holdsNothing) Granted(meta.VolumeID, meta.Grant) {}
func (holdsNothing) Recall(_ meta.Recall, done func()) { done() }
func (holdsNothing) Expired([]meta.VolumeID, error)    {}

// tree opens the session at the first need.
func (r *rig) tree() *tree {
	r.t.Helper()
	if r.looker == nil {
		s, err := client.Dial(r.t.Context(), client.Config{Addrs: []string{r.cluster()}, Creds: peer.Insecure(), Role: wire.RoleAdmin, Name: "test", Handler: holdsNothing{}, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			r.t.Fatal(err)
		}
		r.looker = &tree{r, s}
		r.ends(func() {
			end, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			_ = s.Close(end) // the cluster may be gone
		})
	}
	return r.looker
}

// file puts an empty file into the tree, and the directories above.
func (t *tree) file(at string) {
	t.r.t.Helper()
	v, dir, err := t.Walk(t.r.t.Context(), path.Dir(at), true)
	if err == nil {
		_, err = t.Do(t.r.t.Context(), v, t.NextOp(), &meta.Create{Parent: dir, Name: path.Base(at), Mode: meta.TypeRegular | 0o644}, meta.LeaseNone)
	}
	if err != nil && !errors.Is(err, meta.Exists) {
		t.r.t.Fatal(err)
	}
}

// dirs names the directories and volumes in a directory; none for a missing directory.
func (t *tree) dirs(at string) (names []string) {
	t.r.t.Helper()
	v, dir, err := t.Walk(t.r.t.Context(), at, false)
	if errors.Is(err, meta.NotFound) {
		return nil
	}
	if err != nil {
		t.r.t.Fatal(err)
	}
	r, err := t.Do(t.r.t.Context(), v, meta.OpID{}, &meta.ReadDir{Ino: dir, Max: 4096}, meta.LeaseNone)
	if err != nil {
		t.r.t.Fatal(err)
	}
	for _, e := range r.Entries {
		if e.Type&meta.TypeMask == meta.TypeDir || e.Volume != 0 {
			names = append(names, e.Name)
		}
	}
	return names
}

// pins counts the nodes' pins on a volume's snapshots.
func (r *rig) pins(volume string) int {
	r.t.Helper()
	out, err := r.ctl("pin", "list", volume, "--output", "json")
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Count(string(out), `"holder": "csi-node1-`)
}
