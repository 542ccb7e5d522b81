package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	penstock "penstock.io/penstock"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/digest"
)

// parseDigest parses a full digest, or its 64 digits alone.
func parseDigest(text string) (digest.Sum, error) {
	if len(text) == 2*len(digest.Sum{}) {
		text = "sha256-tree-1:" + text
	}
	sum, err := digest.Parse(text)
	if err != nil {
		return sum, usagef("%w", err)
	}
	return sum, nil
}

func newDigest() *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "digest DIR",
		Short: "Compute the digest of any directory, as snapshots have one",
		Long: `Reads a directory with everything below it, wherever it is, and prints the digest
that a snapshot of the same files has: of names, types, modes, owners, extended
attributes, link targets and contents; times, inode numbers and hard links do not
count. So the digest shows whether an import is complete. Run the command as a user who may read
everything. Directories on which something else is mounted count as empty names.`,
		Example: `  penstock digest /data/imagenet
  penstock snapshot show imagenet v1`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			t, err := newLocalTree(args[0])
			if err != nil {
				return err
			}
			sum, p, err := digest.Walk(cmd.Context(), t, digest.Way{})
			if err != nil {
				return err
			}
			v := digestView{Digest: sum.String(), Inodes: p.Inodes, Bytes: p.Bytes}
			return out.print(cmd.OutOrStdout(), v, func(t *table) { t.row(v.Digest) })
		},
	}
	out.flag(cmd)
	return cmd
}

type digestView struct {
	Digest string `json:"digest" yaml:"digest"`
	Inodes uint64 `json:"inodes" yaml:"inodes"`
	Bytes  uint64 `json:"bytes" yaml:"bytes"`
}

// localTree is a directory of this machine as a source of digests. List numbers entries in the
// order of listing. Numbers behind the siblings of the current entry belong to finished
// subtrees; Stat drops the numbers, and List assigns the numbers again.
type localTree struct {
	dev     uint64
	entries []localEntry // by number
	open    *os.File     // the open file,
	opened  meta.Ino     // by number
}

type localEntry struct {
	path string
	end  int // count of numbers after the listing of the entry's directory
}

var _ digest.Source = (*localTree)(nil)

func newLocalTree(dir string) (*localTree, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, meta.E("digest", meta.NotDir, dir, nil)
	}
	dir, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	first := int(meta.RootIno) + 1
	t := &localTree{dev: st.Dev, entries: make([]localEntry, first)}
	t.entries[meta.RootIno] = localEntry{dir, first}
	return t, nil
}

func (t *localTree) Stat(ctx context.Context, ino meta.Ino) (meta.Attr, error) {
	if err := context.Cause(ctx); err != nil {
		return meta.Attr{}, err
	}
	e := t.entries[ino]
	t.entries = t.entries[:e.end]
	t.close()
	var st unix.Stat_t
	if err := unix.Lstat(e.path, &st); err != nil {
		return meta.Attr{}, fmt.Errorf("%s: %w", e.path, err)
	}
	names, err := xattrNames(e.path)
	a := meta.Attr{Ino: ino, Mode: st.Mode, UID: st.Uid, GID: st.Gid, Size: uint64(st.Size)}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFCHR, unix.S_IFBLK:
		a.Rdev = deviceNumber(st.Rdev)
	}
	if len(names) > 0 {
		a.Flags = meta.FlagHasXattrs
	}
	return a, err
}

// deviceNumber encodes a device's number in 32 bits, as the kernel passes the number to file
// systems and as volumes store the number.
func deviceNumber(dev uint64) uint32 {
	major, minor := unix.Major(dev), unix.Minor(dev)
	return minor&0xff | major<<8 | minor&^0xff<<12
}

func (t *localTree) List(_ context.Context, dir meta.Ino, fn func(string, meta.Ino, meta.VolumeID) error) error {
	path := t.entries[dir].path
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	names, err := d.Readdirnames(-1)
	if err = errors.Join(err, d.Close()); err != nil {
		return err
	}
	end := len(t.entries) + len(names)
	for _, name := range names {
		ino := meta.Ino(len(t.entries))
		t.entries = append(t.entries, localEntry{filepath.Join(path, name), end})
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(path, name), &st); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(path, name), err)
		}
		volume := meta.VolumeID(0)
		if st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Dev != t.dev {
			volume = 1
		}
		if err := fn(name, ino, volume); err != nil {
			return err
		}
	}
	return nil
}

func (t *localTree) ReadLink(_ context.Context, ino meta.Ino) (string, error) {
	return os.Readlink(t.entries[ino].path)
}

func (t *localTree) Xattrs(_ context.Context, ino meta.Ino) ([]digest.Xattr, error) {
	path := t.entries[ino].path
	names, err := xattrNames(path)
	if err != nil {
		return nil, err
	}
	var l []digest.Xattr
	buf := make([]byte, meta.MaxXattrVal)
	for _, name := range names {
		n, err := unix.Lgetxattr(path, name, buf)
		if err != nil {
			return nil, fmt.Errorf("%s: attribute %s: %w", path, name, err)
		}
		l = append(l, digest.Xattr{Name: name, Value: append([]byte(nil), buf[:n]...)})
	}
	return l, nil
}

// xattrNames lists a path's extended attributes, without the synthetic attributes (penstock.*)
// of a penstock mount.
func xattrNames(path string) (names []string, err error) {
	n, err := unix.Llistxattr(path, nil)
	for err == nil && n > 0 {
		buf := make([]byte, n+1024)
		if n, err = unix.Llistxattr(path, buf); errors.Is(err, unix.ERANGE) {
			n, err = unix.Llistxattr(path, nil)
			continue
		} else if err != nil {
			break
		}
		for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
			if name != "" && !strings.HasPrefix(name, "penstock.") {
				names = append(names, name)
			}
		}
		return names, nil
	}
	if errors.Is(err, unix.ENOTSUP) {
		return nil, nil
	}
	if err != nil {
		err = fmt.Errorf("%s: extended attributes: %w", path, err)
	}
	return nil, err
}

// Extents returns a single extent, so that all bytes of the file are read.
func (t *localTree) Extents(_ context.Context, ino meta.Ino) ([]meta.Extent, []byte, error) {
	return []meta.Extent{{Len: meta.MaxFileSize, Chunk: meta.ChunkID{Volume: 1, Term: 1, Counter: 1}}}, nil, nil
}

func (t *localTree) ReadAt(_ context.Context, ino meta.Ino, p []byte, off uint64) error {
	if t.opened != ino {
		f, err := os.OpenFile(t.entries[ino].path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
		if err != nil {
			return err
		}
		t.open, t.opened = f, ino
	}
	_, err := t.open.ReadAt(p, int64(off))
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s: it got shorter while it was read", t.entries[ino].path)
	}
	return err
}

func (t *localTree) close() {
	if t.open != nil {
		t.open.Close()
	}
	t.open, t.opened = nil, 0
}

// connect makes a client of the client library, as a mount does.
func (w *where) connect(ctx context.Context) (*penstock.Client, error) {
	addrs, creds, err := w.identity(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := withinDial(ctx)
	defer cancel()
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	c, err := penstock.Dial(ctx, penstock.Config{
		Meta: addrs, Creds: creds, Logger: slog.New(slog.DiscardHandler), Streams: true,
		Name: fmt.Sprintf("%s: %s %d", host, filepath.Base(os.Args[0]), os.Getpid()),
	})
	return c, w.advise(err, true)
}

func newVerify() *cobra.Command {
	var w where
	var out output
	var want string
	cmd := &cobra.Command{
		Use:   "verify VOLUME@SNAPSHOT",
		Short: "Read a whole snapshot, and compare it with its recorded digest",
		Long: `Reads everything in a snapshot as a mount would: names, attributes and every byte of
every file. Then computes the digest anew, and compares it with the recorded digest of
the snapshot, or with --digest. Fails if the digests differ, or if bytes can't be read.`,
		Example: `  penstock verify datasets@v3
  penstock verify datasets@v3 --digest sha256-tree-1:5feceb66...`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			volume, snapshot, err := snapshotOf(args[0])
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			client, err := w.connect(ctx)
			if err != nil {
				return err
			}
			defer client.Close(context.WithoutCancel(ctx))
			v, err := client.Snapshot(ctx, volume, snapshot)
			if err != nil {
				return w.advise(adviseSnapshot(err, volume), false)
			}
			var recorded penstock.Digest
			if want != "" {
				recorded, err = parseDigest(want)
			} else if recorded, err = v.RecordedDigest(ctx); errors.Is(err, meta.Unavailable) {
				err = fmt.Errorf("%w; wait for it, or give --digest", err)
			}
			if err != nil {
				return err
			}
			sum, p, err := v.ComputeDigest(ctx, nil)
			if err != nil {
				return err
			}
			view := verifyView{digestView{Digest: sum.String(), Inodes: p.Inodes, Bytes: p.Bytes}, recorded.String(), sum == recorded}
			if err := out.print(cmd.OutOrStdout(), view, func(t *table) {
				if view.Same {
					t.row(fmt.Sprintf("%s is %s: %d files and directories, %s", args[0], sum, p.Inodes, bytesText(p.Bytes)))
				}
			}); err != nil || view.Same {
				return err
			}
			if want != "" {
				return meta.E("verify", meta.Corrupt, args[0], &penstock.WrongDigestError{Have: sum, Want: recorded})
			}
			return meta.E("verify", meta.Corrupt, args[0], fmt.Errorf("its digest is %v, and %v is recorded", sum, recorded))
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	cmd.Flags().StringVar(&want, "digest", "", "compare with this digest instead of the recorded one")
	return cmd
}

type verifyView struct {
	digestView `yaml:",inline"`
	Expected   string `json:"expected" yaml:"expected"`
	Same       bool   `json:"same" yaml:"same"`
}
