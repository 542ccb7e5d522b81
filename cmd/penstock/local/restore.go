package local

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/journal/etcd"
	"penstock.io/penstock/meta/peer"
	"penstock.io/penstock/meta/server"
	"penstock.io/penstock/meta/state"
)

// RestoreConfig says how to restore a cluster whose etcd was lost. Restore listens at the
// address of a former metadata server of the cluster, so that the chunk servers connect.
type RestoreConfig struct {
	MetaConfig
	Servers int           // chunk servers to wait for; 0: until no other connected for Quiet
	Quiet   time.Duration // default 10 s
	Wait    time.Duration // bounds the wait for chunk servers; default 5 min
	// From is the file of a backup; "": no file. Overwrite allows Restore to replace the
	// cluster in etcd, which was set back or is broken. Restore saves the replaced records in
	// Dir, and uses the records as the backup if From is "".
	From      string
	Overwrite bool
	// Confirm is called before the first write to etcd; false ends the restore.
	Confirm func(*server.Survey) (bool, error)
}

// Restore surveys the chunk servers and writes the cluster's records and the volumes' journals
// into an etcd without a cluster. If cfg.Dir has a chunk server's disk, Restore serves the
// disk during the survey. Errors: Exists (etcd holds a cluster), NotFound (the disks hold no
// checkpoint), Unavailable.
func Restore(ctx context.Context, cfg RestoreConfig) (sv *server.Survey, err error) {
	if cfg.Quiet == 0 {
		cfg.Quiet = 10 * time.Second
	}
	if cfg.Wait == 0 {
		cfg.Wait = 5 * time.Minute
	}
	var backup *cluster.Backup
	if cfg.From != "" {
		if backup, err = ReadBackup(cfg.From); err != nil {
			return nil, err
		}
	}
	id, lock, err := lockAndCheck(&cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, lock.Close()) }()
	var cli *clientv3.Client
	if len(cfg.Etcd) == 0 {
		e, err := embedded.StartContext(ctx, embedded.Config{Dir: filepath.Join(cfg.Dir, etcdDir), Logger: cfg.Logger.With("part", "etcd")})
		if err != nil {
			return nil, err
		}
		defer e.Close()
		cli = e.Client()
	} else {
		t, err := cfg.EtcdTLS.Config()
		if err != nil {
			return nil, err
		}
		if cli, err = cluster.Dial(cfg.Etcd, t); err != nil {
			return nil, meta.E("connect to etcd", meta.Unavailable, "", err)
		}
		defer cli.Close()
	}
	over, err := overwritten(ctx, cli, cfg)
	if err != nil {
		return nil, err
	}
	if backup == nil {
		backup = over
	}
	authority, err := keptAuthority(cfg.Creds)
	if err != nil {
		return nil, err
	}
	sv, err = survey(ctx, cfg, id, backup)
	if err != nil {
		return sv, err
	}
	if ok, err := cfg.Confirm(sv); err != nil || !ok {
		return sv, err
	}
	if id.Cluster != "" && id.Cluster != sv.Cluster {
		return sv, meta.E("restore cluster", meta.Invalid, cfg.Dir, errors.New("the directory belongs to another cluster than the checkpoints"))
	}
	f, volumes := sv.Founding(meta.Time(time.Now().UnixNano()))
	f.Authority, f.Overwrite = authority, cfg.Overwrite
	if !f.HasAuthority() && cfg.Creds != nil && !cfg.Creds.IsInsecure() {
		return sv, meta.E("restore cluster", meta.NotFound, cfg.Creds.Dir(), errors.New("no authority.sealed is there, which the certificate authority comes back from: use the credentials of another metadata server, or your copy of them"))
	}
	if over != nil {
		path := filepath.Join(cfg.Dir, "etcd-before-"+stamp(f.At)+".backup")
		if err := replaceFile(path, over.Encode()); err != nil {
			return sv, meta.E("restore cluster", meta.IO, path, err)
		}
		cfg.Logger.Info("etcd's old files are kept as a backup", "in", path)
	}
	err = cluster.Refound(ctx, cli, "", f, func(prefix string) error {
		for _, v := range volumes {
			if err := etcd.Restore(ctx, cli, prefix, v); err != nil {
				return err
			}
		}
		return nil
	})
	return sv, err
}

// overwritten checks that etcd holds no cluster, or returns a backup of the cluster to be
// overwritten; nil if etcd holds no cluster. Errors: Exists, Busy, Version, Unavailable.
func overwritten(ctx context.Context, cli *clientv3.Client, cfg RestoreConfig) (*cluster.Backup, error) {
	err := cluster.Absent(ctx, cli, "")
	if !cfg.Overwrite || !errors.Is(err, meta.Exists) {
		return nil, err
	}
	if err := cluster.Overwritable(ctx, cli, ""); err != nil {
		return nil, err
	}
	return cluster.TakeBackup(ctx, cli, "")
}

// keptAuthority returns the certificate authority from a metadata server's credentials, after
// a check that the cluster's key opens the authority; nil without certificates.
func keptAuthority(creds *peer.Credentials) (*peer.Sealed, error) {
	if creds == nil || creds.IsInsecure() {
		return nil, nil
	}
	key, err := creds.ClusterKey()
	if err != nil {
		return nil, err
	}
	sealed, err := creds.SealedAuthority()
	if errors.Is(err, meta.NotFound) {
		// An older program wrote the credentials, and kept the authority in checkpoints.
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if _, err := sealed.Open(key); err != nil {
		return nil, err
	}
	return &sealed, nil
}

// survey listens at a metadata server's address, waits for the chunk servers, and surveys
// their disks.
func survey(ctx context.Context, cfg RestoreConfig, id identity, backup *cluster.Backup) (sv *server.Survey, err error) {
	dir := filepath.Join(cfg.Dir, metaDir)
	scratch := filepath.Join(dir, "scratch")
	if err := os.MkdirAll(scratch, 0o700); err != nil {
		return nil, meta.E("prepare data directory", meta.IO, dir, err)
	}
	blob := newChunkBlob(cfg.Creds, cfg.Logger)
	s, err := server.NewSurveyor(ctx, server.Config{
		Name: cfg.Name, Blob: blob, Logger: cfg.Logger, ScratchDir: scratch,
		ReadChunk: func(ctx context.Context, at meta.ChunkPlace, p []byte, off uint64) error {
			return blob.chunks().ReadAt(ctx, at, p, off)
		},
	})
	if err != nil {
		return nil, err
	}
	blob.server = s
	var serving sync.WaitGroup
	defer func() {
		err = errors.Join(err, s.Close(context.WithoutCancel(ctx)))
		serving.Wait()
		err = errors.Join(err, blob.Close())
	}()
	listeners, addr, err := listen(peer.Listen, filepath.Join(cfg.Dir, MetaSocket), cfg.Listen, cfg.Advertise, cfg.Creds, cfg.Logger)
	if err != nil {
		return nil, err
	}
	failed := make(chan error, len(listeners))
	for _, l := range listeners {
		serving.Go(func() {
			if err := s.Serve(l); err != nil {
				failed <- err
			}
		})
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, chunkDir)); err == nil && id.ServerID != 0 {
		c, err := StartChunkServer(ctx, ChunkConfig{
			Dir: cfg.Dir, Meta: []string{addr}, Topology: "/local", Class: "ssd", ID: id.ServerID, Name: cfg.Name, Logger: cfg.Logger, Creds: cfg.Creds,
		})
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, c.Close(context.WithoutCancel(ctx))) }()
	}
	wait, cancel := context.WithTimeoutCause(ctx, cfg.Wait, errors.New("no more waiting for them"))
	defer cancel()
	if err := s.AwaitServers(wait, cfg.Servers, cfg.Quiet); err != nil {
		return nil, err
	}
	shared := state.NewShared(64<<20, 1000, cfg.Logger.With("part", "state"))
	defer shared.Close()
	if sv, err = s.Survey(ctx, scratch, shared, backup); err == nil {
		noteNewerCopies(sv, dir, shared)
	}
	return sv, err
}

// noteNewerCopies adds a note for each volume of which this metadata server has a copy newer
// than the restored state. The operator needs the notes to decide about the restore.
func noteNewerCopies(sv *server.Survey, dir string, shared *state.Shared) {
	for _, v := range sv.Volumes {
		path := filepath.Join(dir, fmt.Sprintf("volume-%08x", uint32(v.ID)))
		st, err := state.Open(path, v.ID, shared)
		if err != nil {
			continue // no copy, or an unusable copy
		}
		at := st.Applied().Seq
		if err := st.Close(); err == nil && at > v.Seq {
			sv.Notes = append(sv.Notes, fmt.Sprintf("volume %s (%d): this server's own copy goes on to journal entry %d and is newer; nothing is taken from it, and once the cluster is restored it is set aside in %s", v.Name, v.ID, at, dir))
		}
	}
}
