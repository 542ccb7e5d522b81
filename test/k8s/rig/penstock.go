package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Meta is the address of the metadata server.
func (r *Rig) Meta() string { return r.order[0].Addr + ":" + MetaPort }

func (r *Rig) credentials(who string) string { return filepath.Join(r.Dir, "credentials", who) }

// startPenstock starts a cluster with certificates, as docs/operations.md describes: a
// metadata server with an embedded etcd, and a chunk server on each machine in a rack.
func (r *Rig) startPenstock() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	main := r.order[0]
	state := filepath.Join(main.dir, "meta")
	if out, err := main.Command(ctx, r.penstock, "cluster", "init", "--dir", state, "--credentials", r.credentials("")).CombinedOutput(); err != nil {
		return fmt.Errorf("cluster init: %w: %s", err, out)
	}
	if err := r.StartMeta(); err != nil {
		return err
	}
	if err := r.Until(time.Minute, "the metadata server answers", func(ctx context.Context) error {
		_, err := r.Penstock(ctx, "volume", "list")
		return err
	}); err != nil {
		return err
	}
	racks := 0
	for n, p := range places {
		if p.rack == "" {
			continue
		}
		racks++
		m := r.order[n]
		if err := r.Join(ctx, m, "chunkserver", p.name+"-chunks"); err != nil {
			return err
		}
		chunks := filepath.Join(m.dir, "chunks")
		if p.disk != "" {
			if out, err := m.Command(ctx, "sh", "-ec", "mkdir "+chunks+"; mount -t tmpfs -o size="+p.disk+" tmpfs "+chunks).CombinedOutput(); err != nil {
				return fmt.Errorf("a disk of %s: %w: %s", p.name, err, out)
			}
		}
		if _, err := m.Start("chunkserver", r.penstock, "chunkserver", "--data", chunks, "--cluster", r.Meta(),
			"--listen", m.Addr+":7500", "--topology", "/dc1/"+p.rack+"/"+p.name, "--credentials", r.credentials(p.name+"-chunks")); err != nil {
			return err
		}
	}
	return r.Until(time.Minute, "the chunk servers are known", func(ctx context.Context) error {
		out, err := r.Penstock(ctx, "node", "list", "--output", "json")
		if n := strings.Count(out, `"live": true`); err == nil && n != racks {
			err = fmt.Errorf("%d of %d are", n, racks)
		}
		return err
	})
}

// StartMeta starts the metadata server, also again.
func (r *Rig) StartMeta() error {
	main := r.order[0]
	_, err := main.Start("meta", r.penstock, "meta", "--dir", filepath.Join(main.dir, "meta"), "--listen", r.Meta(), "--credentials", r.credentials("meta"))
	return err
}

// Join makes credentials for a role on a machine, and keeps them under a name.
func (r *Rig) Join(ctx context.Context, m *Machine, role, name string) error {
	token, err := r.Penstock(ctx, "cluster", "join-token", "--role", role)
	if err != nil {
		return err
	}
	join := m.Command(ctx, r.penstock, "cluster", "join", "--cluster", r.Meta(), "--name", name, "--credentials", r.credentials(name))
	join.Stdin = strings.NewReader(token)
	if out, err := join.CombinedOutput(); err != nil {
		return fmt.Errorf("join as %s: %w: %s", name, err, out)
	}
	return nil
}

// Penstock runs a penstock command as the administrator.
func (r *Rig) Penstock(ctx context.Context, args ...string) (string, error) {
	return r.PenstockOn(ctx, "node1", append(args, "--cluster", r.Meta(), "--credentials", r.credentials("admin"))...)
}

// PenstockOn runs a penstock command on a machine, without an identity.
func (r *Rig) PenstockOn(ctx context.Context, machine string, args ...string) (string, error) {
	cmd := r.Machine(machine).Command(ctx, r.penstock, args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("penstock %s: %w: %s", strings.Join(args, " "), err, errs.String())
	}
	return out.String(), nil
}

// MountTree mounts the whole tree on the workstation, for a client that may write
// everywhere, and returns the mount point.
func (r *Rig) MountTree(ctx context.Context) (string, error) {
	desk := r.Machine("desk")
	at := "/run/tree"
	if _, err := r.Penstock(ctx, "grant", "add", "desk", "*", "--rights", "write"); err != nil {
		return "", err
	}
	if _, err := os.Stat(r.credentials("desk")); err != nil {
		if err := r.Join(ctx, desk, "client", "desk"); err != nil {
			return "", err
		}
	}
	if out, err := desk.Command(ctx, "mkdir", "-p", at).CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	_, err := r.PenstockOn(ctx, "desk", "mount", "--background", "--log-file", desk.Log("mount"), "--cluster", r.Meta(), "--credentials", r.credentials("desk"), "/", at)
	return at, err
}

// Volume is a volume in the output of `penstock volume list`.
type Volume struct {
	ID   int    `json:"id"`
	Name string `json:"name"`
}

// Volumes lists the cluster's volumes except the root.
func (r *Rig) Volumes(ctx context.Context) (l []Volume, err error) {
	out, err := r.Penstock(ctx, "volume", "list", "--output", "json")
	if err != nil {
		return nil, err
	}
	var all []Volume
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, err
	}
	for _, v := range all {
		if v.ID != 1 {
			l = append(l, v)
		}
	}
	return l, nil
}

// RevokeByHand revokes the grants that people gave to a client.
func (r *Rig) RevokeByHand(ctx context.Context, who string) error {
	out, err := r.Penstock(ctx, "grant", "list", "--output", "json")
	if err != nil {
		return err
	}
	var l []struct {
		ID  uint64 `json:"id"`
		Who string `json:"who"`
		For string `json:"for"`
	}
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		return err
	}
	revoked := 0
	for _, g := range l {
		if g.Who != who || g.For != "" {
			continue
		}
		if _, err := r.Penstock(ctx, "grant", "revoke", fmt.Sprint(g.ID)); err != nil {
			return err
		}
		revoked++
	}
	if revoked == 0 {
		return fmt.Errorf("nothing is granted to %s: %s", who, out)
	}
	return nil
}

// Published lists the grants that nodes have while volumes are published to them, as
// "NODE VOLUME", by number.
func (r *Rig) Published(ctx context.Context) (all []string, err error) {
	out, err := r.Penstock(ctx, "grant", "list", "--output", "json")
	if err != nil {
		return nil, err
	}
	var l []struct {
		Who    string `json:"who"`
		Volume int    `json:"volume"`
		For    string `json:"for"`
	}
	if err := json.Unmarshal([]byte(out), &l); err != nil {
		return nil, err
	}
	for _, g := range l {
		if g.For != "" {
			all = append(all, fmt.Sprintf("%s %d", strings.TrimPrefix(g.Who, "client/"), g.Volume))
		}
	}
	return all, nil
}
