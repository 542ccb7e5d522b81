package peer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"penstock.io/penstock/meta"
)

// DialLocal connects to a server's socket on this machine, at a path learned from the cluster.
// The path may belong to another process here (a container has its own name spaces). So the
// answering process must run as root, as this process's user or, if this process is root, as a
// user to whom root gave the socket's directory. The caller must identify the server
// nevertheless. Errors: Unavailable (no process answers, or addr is no absolute Unix path),
// AccessDenied.
func DialLocal(ctx context.Context, addr string) (net.Conn, error) {
	const op = "dial"
	path, ok := strings.CutPrefix(addr, "unix:")
	if !ok || !filepath.IsAbs(path) {
		return nil, meta.E(op, meta.Unavailable, addr, errors.New("not a socket's path"))
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, meta.E(op, meta.Unavailable, addr, err)
	}
	uid, err := peerUID(nc.(*net.UnixConn))
	if err == nil && uid != 0 && int(uid) != os.Geteuid() {
		err = fmt.Errorf("user %d answers", uid)
		if os.Geteuid() == 0 {
			err = entrusted(filepath.Dir(filepath.Clean(path)), uid)
		}
	}
	if err != nil {
		nc.Close()
		return nil, meta.E(op, meta.AccessDenied, addr, err)
	}
	return nc, nil
}

// entrusted checks that only root and the user uid can have created or replaced a name in dir,
// or in a directory above dir.
func entrusted(dir string, uid uint32) error {
	for {
		fi, err := os.Lstat(dir)
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		if !fi.IsDir() || st.Uid != 0 && st.Uid != uid || fi.Mode().Perm()&0o022 != 0 {
			return fmt.Errorf("user %d answers, and others may write to %s", uid, dir)
		}
		if dir == "/" {
			return nil
		}
		dir = filepath.Dir(dir)
	}
}
