package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"penstock.io/penstock/fuse"
	"penstock.io/penstock/meta"
	"penstock.io/penstock/meta/client"
	"penstock.io/penstock/meta/wire"
)

// locateView describes the chunks and servers of a file's bytes.
type locateView struct {
	Path     string       `json:"path" yaml:"path"`
	Volume   string       `json:"volume" yaml:"volume"`
	Snapshot string       `json:"snapshot,omitempty" yaml:"snapshot,omitempty"` // none: the live file
	Inode    uint64       `json:"inode" yaml:"inode"`
	Size     uint64       `json:"size" yaml:"size"`
	Inline   bool         `json:"inline" yaml:"inline"` // the bytes lie in the inode's record
	Extents  []extentView `json:"extents" yaml:"extents"`
}

// extentView is a run of a file's bytes.
type extentView struct {
	Offset      uint64   `json:"offset" yaml:"offset"`
	Length      uint64   `json:"length" yaml:"length"`
	Chunk       string   `json:"chunk,omitempty" yaml:"chunk,omitempty"` // none: preallocated zeros
	ChunkOffset uint64   `json:"chunk_offset" yaml:"chunk_offset"`
	OpenEnded   bool     `json:"open_ended,omitempty" yaml:"open_ended,omitempty"`
	Sealed      bool     `json:"sealed" yaml:"sealed"`
	Servers     []uint64 `json:"servers,omitempty" yaml:"servers,omitempty"`
	// Away are the members of Servers that can't be reached now.
	Away []uint64 `json:"away,omitempty" yaml:"away,omitempty"`
	// Wanted is the number of replicas in the policy of the chunk's volume, if fewer replicas
	// can be reached; else 0.
	Wanted uint32 `json:"wanted,omitempty" yaml:"wanted,omitempty"`
}

// marks sets Away and Wanted of an extent's chunk.
func (x *extentView) marks(live []meta.ServerInfo, wanted uint32) {
	if x.Chunk == "" || len(x.Servers) == 0 {
		return
	}
	for _, id := range x.Servers {
		if len(live) > 0 && !slices.ContainsFunc(live, func(i meta.ServerInfo) bool { return uint64(i.ID) == id }) {
			x.Away = append(x.Away, id)
		}
	}
	if uint32(len(x.Servers)-len(x.Away)) < wanted {
		x.Wanted = wanted
	}
}

// serversText names the servers, with "(away)" after each server in Away.
func (x *extentView) serversText() string {
	var all []string
	for _, id := range x.Servers {
		text := fmt.Sprint(id)
		if slices.Contains(x.Away, id) {
			text += " (away)"
		}
		all = append(all, text)
	}
	return strings.Join(all, " ")
}

func newLocate() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "locate PATH",
		Short: "Show in which chunks, on which chunk servers, a file's bytes lie",
		Long: `Shows the extents of a file: each range of bytes with its chunk and the chunk servers
that have the chunk, and, for a chunk with fewer replicas than the volume wants, the
number of reachable replicas. PATH is a file on a mount of this machine, also in a
snapshot; --cluster must be the cluster of the mount. Bytes that were written and not
yet synced have no place yet.`,
		Example: `  penstock locate /mnt/penstock/datasets/shard-0001.tar
  penstock locate /mnt/penstock/a.jpg --output json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			at, err := onMount(args[0])
			if err != nil {
				return err
			}
			return w.with(cmd.Context(), func(s *client.Session) error {
				if err := at.isOf(s.Cluster()); err != nil {
					return err
				}
				view := locateView{Path: args[0], Volume: fmt.Sprint(at.volume), Inode: uint64(at.ino), Extents: []extentView{}}
				v, err := s.LookUpVolume(cmd.Context(), at.volume, "")
				if err != nil {
					return err
				}
				view.Volume = v.Name
				view.Snapshot = at.snapshot
				replicas := map[meta.VolumeID]uint32{at.volume: v.Policy.Replicas}
				var off uint64
				for {
					r, err := s.DoAt(cmd.Context(), at.volume, at.generation, &meta.Open{Ino: at.ino, Off: off})
					if err != nil {
						return err
					}
					view.Size, view.Inline = r.Attr.Size, r.Attr.Flags&meta.FlagInline != 0
					for _, e := range r.Extents {
						x := viewExtent(e, r.Places)
						if _, known := replicas[e.Chunk.Volume]; !known && !e.Chunk.IsZero() { // a clone's chunk in the origin
							origin, err := s.LookUpVolume(cmd.Context(), e.Chunk.Volume, "")
							if err != nil {
								origin = wire.VolumeInfo{} // without a right to the origin, its policy is unknown
							}
							replicas[e.Chunk.Volume] = origin.Policy.Replicas
						}
						x.marks(s.Servers(), replicas[e.Chunk.Volume])
						view.Extents = append(view.Extents, x)
						off = e.End()
					}
					if r.EOF || len(r.Extents) == 0 {
						break
					}
				}
				return out.print(cmd.OutOrStdout(), view, func(t *table) { view.table(t) })
			})
		},
	}
	out.flag(cmd)
	w.flags(cmd)
	return cmd
}

func viewExtent(e meta.Extent, places []meta.ChunkPlace) extentView {
	x := extentView{Offset: e.Off, Length: e.Len, ChunkOffset: e.ChunkOff, OpenEnded: e.OpenEnded}
	if e.Chunk.IsZero() {
		return x
	}
	x.Chunk = e.Chunk.String()
	for _, p := range places {
		if p.ID == e.Chunk {
			x.Sealed = p.Sealed
			for _, id := range p.Servers {
				x.Servers = append(x.Servers, uint64(id))
			}
		}
	}
	return x
}

func (v locateView) table(t *table) {
	t.row("path", v.Path)
	t.row("volume", v.Volume)
	if v.Snapshot != "" {
		t.row("snapshot", v.Snapshot)
	}
	t.row("inode", v.Inode)
	t.row("size", v.Size)
	if v.Inline {
		t.row("bytes", "in the inode's record")
		return
	}
	t.row()
	t.row("OFFSET", "LENGTH", "CHUNK", "AT", "STATE", "SERVERS")
	for _, e := range v.Extents {
		state := "open"
		switch {
		case e.Chunk == "":
			state = "zeros"
		case e.Sealed && len(e.Servers) == 0:
			state = "lost"
		case e.Sealed:
			state = "sealed"
		}
		if e.Wanted > 0 {
			state += fmt.Sprintf(", %d of %d replicas", len(e.Servers)-len(e.Away), e.Wanted)
		}
		chunk := e.Chunk
		if chunk == "" {
			chunk = "-"
		}
		t.row(e.Offset, e.Length, chunk, e.ChunkOffset, state, e.serversText())
	}
}

// mountTypes are the types of penstock mounts in /proc/self/mountinfo.
var mountTypes = []string{"fuse.penstock", "fuseblk.penstock"}

// located is an inode of a snapshot; of a live volume if generation is zero.
type located struct {
	path       string
	cluster    string // the cluster's id
	volume     meta.VolumeID
	ino        meta.Ino
	snapshot   string
	generation meta.Generation
}

// isOf refuses a path on a mount of another cluster than asked: the same numbers of volume and
// inode may exist in the asked cluster and denote another file.
func (at *located) isOf(asked string) error {
	if at.cluster != asked {
		return fmt.Errorf("%s is on a mount of cluster %s, and cluster %s was asked: say where the mount's cluster is, with --cluster or --dir", at.path, at.cluster, asked)
	}
	return nil
}

// onMount finds the file at a path on a mount. The mount's extended attributes name the
// cluster, volume and snapshot, because an inode number alone does not identify the cluster.
func onMount(path string) (located, error) {
	at := located{path: path}
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_TYPE, &st)
	if err != nil {
		return at, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	ours, err := isOurMount(st.Dev_major, st.Dev_minor)
	if err != nil {
		return at, err
	}
	if !ours {
		return at, fmt.Errorf("%s is not on a mount of penstock", path)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return at, fmt.Errorf("%s is not a regular file: it has no bytes of its own", path)
	}
	if at.cluster, err = told(path, fuse.XattrCluster); errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return at, fmt.Errorf("%s: the file system does not say of which cluster this file is: it is no file of a volume", path)
	}
	if err != nil {
		return at, err
	}
	inode, err := told(path, fuse.XattrInode)
	if err != nil {
		return at, err
	}
	if _, err := fmt.Sscanf(inode, "%d:%d", &at.volume, &at.ino); err != nil {
		return at, fmt.Errorf("%s is in volume and inode %q: %w", path, inode, err)
	}
	generation, err := told(path, fuse.XattrSnapshot)
	if errors.Is(err, unix.ENODATA) {
		return at, nil // a live file
	}
	if err != nil {
		return at, err
	}
	if _, err := fmt.Sscan(generation, &at.generation); err != nil {
		return at, fmt.Errorf("%s is in generation %q: %w", path, generation, err)
	}
	volume, err := told(path, fuse.XattrVolume)
	if err != nil {
		return at, err
	}
	at.snapshot = volume[strings.LastIndexByte(volume, '@')+1:]
	return at, nil
}

// told reads one of the mount's synthetic attributes of a file.
func told(path, name string) (string, error) {
	b := make([]byte, 2*meta.MaxName)
	n, err := unix.Lgetxattr(path, name, b)
	if err != nil {
		return "", &os.PathError{Op: "getxattr " + name, Path: path, Err: err}
	}
	return string(b[:n]), nil
}

func isOurMount(major, minor uint32) (bool, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	device := fmt.Sprintf("%d:%d", major, minor)
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		dash := strings.Index(line, " - ")
		if len(fields) > 3 && fields[2] == device && dash > 0 {
			kind, _, _ := strings.Cut(line[dash+3:], " ")
			return slices.Contains(mountTypes, kind), nil
		}
	}
	return false, nil
}
