package local

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"

	clientv3 "go.etcd.io/etcd/client/v3"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
)

// BackupConfig names the etcd to back up.
type BackupConfig struct {
	Etcd    []string
	EtcdTLS EtcdTLS
	// Dir is the data directory of a metadata server, or of 'penstock up', with an embedded
	// etcd, running or not. Dir is used if Etcd is empty.
	Dir    string
	Logger *slog.Logger
}

// TakeBackup writes all of the cluster's records in etcd into a file of mode 0600. The new
// file replaces an existing file once all of the new file is on disk. Errors: NotFound (etcd
// holds no cluster), Unavailable, IO.
func TakeBackup(ctx context.Context, cfg BackupConfig, path string) (b *cluster.Backup, size int, err error) {
	cli, release, err := reachEtcd(ctx, cfg)
	if err != nil {
		return nil, 0, err
	}
	defer func() { err = errors.Join(err, release()) }()
	if b, err = cluster.TakeBackup(ctx, cli, ""); err != nil {
		return nil, 0, err
	}
	all := b.Encode()
	if err := replaceFile(path, all); err != nil {
		return nil, 0, meta.E("back up cluster", meta.IO, path, err)
	}
	return b, len(all), nil
}

// reachEtcd returns a client of the etcd and a function to release the client. If no process
// serves cfg.Dir, reachEtcd starts the embedded etcd, and release stops it.
func reachEtcd(ctx context.Context, cfg BackupConfig) (*clientv3.Client, func() error, error) {
	if len(cfg.Etcd) > 0 {
		t, err := cfg.EtcdTLS.Config()
		if err != nil {
			return nil, nil, err
		}
		cli, err := cluster.Dial(cfg.Etcd, t)
		if err != nil {
			return nil, nil, err
		}
		return cli, cli.Close, nil
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, nil, meta.E("back up cluster", meta.Invalid, cfg.Dir, err)
	}
	at := filepath.Join(dir, etcdDir)
	if _, err := os.Stat(filepath.Join(at, "member")); err != nil {
		return nil, nil, meta.E("back up cluster", meta.NotFound, dir, errors.New("no etcd is embedded there; say where it is with --etcd"))
	}
	lock, err := embedded.LockDir(dir)
	if errors.Is(err, meta.DirectoryInUse) {
		cli, err := cluster.Dial([]string{embedded.EndpointIn(at)}, nil)
		if err != nil {
			return nil, nil, err
		}
		return cli, cli.Close, nil
	}
	if err != nil {
		return nil, nil, err
	}
	e, err := embedded.StartContext(ctx, embedded.Config{Dir: at, Logger: cfg.Logger})
	if err != nil {
		return nil, nil, errors.Join(err, lock.Close())
	}
	return e.Client(), func() error { return errors.Join(e.Close(), lock.Close()) }, nil
}

// ReadBackup reads a backup file. Errors: NotFound, IO, Corrupt, Version.
func ReadBackup(path string) (*cluster.Backup, error) {
	const op = "read backup"
	all, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, meta.E(op, meta.NotFound, path, nil)
	}
	if err != nil {
		return nil, meta.E(op, meta.IO, path, err)
	}
	b, err := cluster.DecodeBackup(all)
	if err != nil {
		return nil, meta.E(op, meta.KindOf(err), path, err)
	}
	return b, nil
}
