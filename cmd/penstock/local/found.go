package local

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/cluster"
	"penstock.io/penstock/meta/cluster/embedded"
	"penstock.io/penstock/meta/peer"
)

// FoundConfig describes a new cluster.
type FoundConfig struct {
	// Dir is the data directory of the first metadata server, with the embedded etcd for the
	// cluster. If Etcd has endpoints, Dir is not used.
	Dir     string
	Etcd    []string
	EtcdTLS EtcdTLS
	// Credentials is a directory that does not exist yet, or an empty directory. Found creates
	// "meta" for the first metadata server and "admin" for the administrator in the directory.
	// An empty directory keeps its owner and mode.
	Credentials string
	Meta        string        // name of the first meta server
	Life        time.Duration // of certificates
	Logger      *slog.Logger

	// step is called after each step with the step's name; a test ends the process in step.
	step func(string)
}

// notYet is the suffix of the staging directory beside FoundConfig.Credentials, until the
// cluster certainly exists.
const notYet = ".new"

// Found makes a cluster with a certificate authority. Found never changes an existing cluster.
//
// After a crash, or a call to etcd without an answer, the caller calls Found again and gets
// the same cluster: Found writes all that can't be made a second time, above all the key of
// the authority, to disk before the first write to etcd. The files are in a directory beside
// Credentials; the last step renames the directory to Credentials. (An earlier version kept
// the key only in memory and lost the key of a cluster that already existed: no server could
// ever join that cluster.)
//
// Errors: Exists, Busy (another process makes a cluster there), Invalid, Unavailable.
func Found(ctx context.Context, cfg FoundConfig) (id string, err error) {
	const op = "make cluster"
	if err := peer.CheckName(cfg.Meta); err != nil {
		return "", err
	}
	if cfg.step == nil {
		cfg.step = func(string) {}
	}
	if cfg.Credentials, err = filepath.Abs(cfg.Credentials); err != nil {
		return "", meta.E(op, meta.Invalid, cfg.Credentials, err)
	}
	list, err := os.ReadDir(cfg.Credentials)
	if len(list) > 0 || errors.Is(err, unix.ENOTDIR) {
		return "", meta.E(op, meta.Exists, cfg.Credentials, errors.New("credentials are written to a directory that does not exist yet, or is empty"))
	}
	var empty unix.Stat_t // an existing empty directory
	if err == nil {
		err = unix.Stat(cfg.Credentials, &empty)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", meta.E(op, meta.IO, cfg.Credentials, err)
	}
	unlock, err := lockParent(cfg.Credentials)
	if err != nil {
		return "", err
	}
	defer unlock()
	cli, done, err := cfg.etcd(ctx)
	if err != nil {
		return "", err
	}
	defer done()
	staged := cfg.Credentials + notYet
	first, admin, err := cfg.staged(staged)
	if meta.KindOf(err) == meta.NotFound {
		// The staged files are incomplete, so etcd has no record of the staged cluster.
		if err := cluster.Vacant(ctx, cli, cluster.Config{}); err != nil {
			return "", err
		}
		if err := os.RemoveAll(staged); err != nil {
			return "", meta.E(op, meta.IO, staged, err)
		}
		if err := cfg.stage(staged); err != nil {
			return "", err
		}
		first, admin, err = cfg.staged(staged)
	}
	if err != nil {
		return "", err
	}
	cfg.step("staged")
	sealed, err := first.SealedAuthority()
	if err != nil {
		return "", err
	}
	id = first.Identity().Cluster
	if err := cluster.Found(ctx, cli, cluster.Config{}, id, sealed); err != nil {
		if errors.Is(err, meta.Exists) {
			// If the staged cluster was made at another etcd, the staged keys are the only
			// copy.
			err = fmt.Errorf("%w; %s has the keys of a cluster %s: remove it only if no etcd has that", err, staged, id)
		}
		return "", err
	}
	cfg.step("made")
	c, err := cluster.Open(ctx, cli, cluster.Config{Expect: id, Logger: cfg.Logger})
	if err != nil {
		return id, err
	}
	defer c.Close()
	for _, creds := range []*peer.Credentials{first, admin} {
		who := creds.Identity()
		if _, err := c.Enrol(ctx, cluster.Member{Role: who.Role, Name: who.Name, Joined: meta.Time(time.Now().UnixNano())}, true); err != nil {
			return id, err
		}
		cfg.step("enrolled " + string(who.Role))
		if time.Now().After(creds.RenewAt()) { // staged long ago
			if err := reissue(creds, first, sealed); err != nil {
				return id, err
			}
		}
	}
	if empty.Nlink > 0 {
		if err := errors.Join(os.Chown(staged, int(empty.Uid), int(empty.Gid)), unix.Chmod(staged, empty.Mode&0o7777)); err != nil {
			return id, meta.E(op, meta.IO, staged, err)
		}
	}
	// Not os.Rename, which does not replace a directory.
	if err := errors.Join(unix.Rename(staged, cfg.Credentials), syncDir(filepath.Dir(cfg.Credentials))); err != nil {
		return id, meta.E(op, meta.IO, cfg.Credentials, err)
	}
	return id, nil
}

// stage writes a cluster's authority and first credentials to a directory. stage writes the
// administrator's credentials last.
func (cfg *FoundConfig) stage(dir string) error {
	id, key := cluster.NewID(), make([]byte, peer.SealKeySize)
	rand.Read(key)
	a, err := peer.NewAuthority(id, cfg.Life)
	if err != nil {
		return err
	}
	sealed, err := a.Seal(key)
	if err != nil {
		return err
	}
	first := filepath.Join(dir, "meta")
	if err := a.Issue(first, peer.Identity{Cluster: id, Role: peer.Meta, Name: cfg.Meta}, key); err != nil {
		return err
	}
	if err := peer.KeepAuthority(first, sealed); err != nil {
		return err
	}
	if err := a.Issue(filepath.Join(dir, "admin"), peer.Identity{Cluster: id, Role: peer.Admin, Name: "admin"}, nil); err != nil {
		return err
	}
	if err := errors.Join(syncDir(dir), syncDir(filepath.Dir(dir))); err != nil {
		return meta.E("make cluster", meta.IO, dir, err)
	}
	return nil
}

// staged reads the files that stage wrote. Errors: NotFound (files are missing), Invalid (the
// first metadata server has another name).
func (cfg *FoundConfig) staged(dir string) (first, admin *peer.Credentials, err error) {
	if admin, err = peer.Load(filepath.Join(dir, "admin"), cfg.Logger); err != nil {
		return nil, nil, err
	}
	if first, err = peer.Load(filepath.Join(dir, "meta"), cfg.Logger); err != nil {
		return nil, nil, err
	}
	if name := first.Identity().Name; name != cfg.Meta {
		return nil, nil, meta.E("make cluster", meta.Invalid, cfg.Meta, fmt.Errorf("%s is of a cluster that is being made with the metadata server %s: go on with that name, or remove it if that cluster never ran", dir, name))
	}
	if _, err := first.ClusterKey(); err != nil {
		return nil, nil, err
	}
	_, err = first.SealedAuthority()
	return first, admin, err
}

// reissue gives credentials a new certificate, signed by the staged authority.
func reissue(creds, first *peer.Credentials, sealed peer.Sealed) error {
	key, err := first.ClusterKey()
	if err != nil {
		return err
	}
	a, err := sealed.Open(key)
	if err != nil {
		return err
	}
	return peer.Renew(creds, func(request []byte) ([]byte, error) { return a.Sign(creds.Identity(), request) })
}

// etcd returns a client of the cluster's etcd and a function to release the client.
func (cfg *FoundConfig) etcd(ctx context.Context) (*clientv3.Client, func(), error) {
	if len(cfg.Etcd) == 0 {
		_, lock, err := lockAndCheck(&cfg.Dir)
		if err != nil {
			return nil, nil, err
		}
		s, err := embedded.StartContext(ctx, embedded.Config{Dir: filepath.Join(cfg.Dir, etcdDir), Logger: cfg.Logger.With("part", "etcd")})
		if err != nil {
			return nil, nil, errors.Join(err, lock.Close())
		}
		return s.Client(), func() { s.Close(); lock.Close() }, nil
	}
	t, err := cfg.EtcdTLS.Config()
	if err != nil {
		return nil, nil, err
	}
	cli, err := cluster.Dial(cfg.Etcd, t)
	if err != nil {
		return nil, nil, err
	}
	return cli, func() { cli.Close() }, nil
}

// lockParent creates the parent directory of path if the directory does not exist, and locks
// the directory against other calls of Found. Errors: Busy, IO.
func lockParent(path string) (unlock func(), err error) {
	const op = "make cluster"
	parent := filepath.Dir(path)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return nil, meta.E(op, meta.IO, parent, err)
	}
	d, err := os.Open(parent)
	if err != nil {
		return nil, meta.E(op, meta.IO, parent, err)
	}
	if err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		d.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, meta.E(op, meta.Busy, path, errors.New("another process makes a cluster there"))
		}
		return nil, meta.E(op, meta.IO, parent, err)
	}
	return func() { d.Close() }, nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
