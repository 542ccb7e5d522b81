package local

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"time"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/admin"
	"penstock.io/penstock/meta/cluster/embedded"
)

// lockAndCheck makes *dir absolute, locks the data directory for this process, and returns the
// directory's identity. A new directory gets an identity file.
func lockAndCheck(dir *string) (identity, *embedded.Lock, error) {
	abs, err := filepath.Abs(*dir)
	if err != nil {
		return identity{}, nil, meta.E("open data directory", meta.Invalid, *dir, err)
	}
	*dir = abs
	id, err := readIdentity(abs)
	if err != nil {
		return id, nil, err
	}
	lock, err := embedded.LockDir(abs)
	if err != nil {
		return id, nil, err
	}
	if id.Version == 0 {
		if err := id.write(abs); err != nil {
			return id, nil, errors.Join(err, lock.Close())
		}
	}
	return id, lock, nil
}

// RunMeta starts a metadata server as a process of its own. RunMeta opens the volumes in the
// background, because opening a volume may wait for chunk servers.
func RunMeta(ctx context.Context, cfg MetaConfig) (*Meta, func() error, error) {
	id, lock, err := lockAndCheck(&cfg.Dir)
	if err != nil {
		return nil, nil, err
	}
	cfg.Cluster, cfg.KeepForCheckpoint = id.Cluster, true
	m, err := StartMeta(ctx, cfg)
	if err != nil {
		return nil, nil, errors.Join(err, lock.Close())
	}
	if id.Cluster == "" {
		id.Cluster = m.cluster.ID()
		if err := id.write(cfg.Dir); err != nil {
			end, cancel := stopping(ctx)
			defer cancel()
			return nil, nil, errors.Join(err, m.Close(end), lock.Close())
		}
	}
	m.serve.Go(func() {
		err := whenAvailable(ctx, m.OpenVolumes, func(err error) {
			cfg.Logger.Warn("volumes could not be opened yet; the server tries again", "error", err)
		})
		if err != nil && ctx.Err() == nil {
			m.fail(err)
		}
	})
	return m, lock.Close, nil
}

// whenAvailable calls do until do succeeds or fails with a lasting error. Before each retry,
// whenAvailable passes the error to later. So a server that starts while etcd elects a leader,
// or loses a volume to another server while opening the volume, does not exit, and serves
// later.
func whenAvailable(ctx context.Context, do func(context.Context) error, later func(error)) error {
	for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		err := do(ctx)
		if err == nil || !passes(err) {
			return err
		}
		later(err)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// passes reports whether every error joined in err is transient (Unavailable or Fenced).
func passes(err error) bool {
	switch err := err.(type) {
	case *meta.Error:
		return err.Kind == meta.Unavailable || err.Kind == meta.Fenced
	case interface{ Unwrap() []error }:
		return !slices.ContainsFunc(err.Unwrap(), func(err error) bool { return !passes(err) })
	case interface{ Unwrap() error }:
		return passes(err.Unwrap())
	}
	return false
}

// enrol asks the metadata servers for the number of a chunk server. It waits until a server can be
// reached.
func enrol(ctx context.Context, cfg *ChunkConfig, id meta.ServerID) (*admin.EnrolChunkServerResponse, error) {
	c, err := admin.New(admin.Config{Addrs: cfg.Meta, Creds: cfg.Creds, Reach: math.MaxInt64})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.Enrolment.EnrolChunkServer(ctx, &admin.EnrolChunkServerRequest{Server: uint64(id)})
}

// RunChunkServer starts a chunk server as a process of its own. A new chunk server gets its
// number from the cluster.
func RunChunkServer(ctx context.Context, cfg ChunkConfig) (*Chunk, func() error, error) {
	id, lock, err := lockAndCheck(&cfg.Dir)
	if err != nil {
		return nil, nil, err
	}
	fail := func(err error) (*Chunk, func() error, error) { return nil, nil, errors.Join(err, lock.Close()) }
	h, err := enrol(ctx, &cfg, id.ServerID)
	if err != nil {
		return fail(err)
	}
	if h.Cluster == "" {
		h.Cluster = id.Cluster // from a restore that does not know the id yet
	}
	server := meta.ServerID(h.Server)
	if id.ServerID == 0 || id.Cluster == "" {
		id.ServerID, id.Cluster = server, h.Cluster
		if err := id.write(cfg.Dir); err != nil {
			return fail(err)
		}
	} else if server != id.ServerID {
		return fail(meta.E("enrol", meta.Invalid, cfg.Dir, fmt.Errorf("the directory is of server %d, the cluster answered %d", id.ServerID, h.Server)))
	}
	cfg.Cluster, cfg.ID, cfg.AnyDisk = diskCluster(h.Cluster), id.ServerID, true
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return fail(meta.E("open data directory", meta.IO, cfg.Dir, err))
	}
	c, err := StartChunkServer(ctx, cfg)
	if err != nil {
		return fail(err)
	}
	return c, lock.Close, nil
}
