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
)

// locateView says where a file's bytes lie.
type locateView struct {
	Path     string       `json:"path" yaml:"path"`
	Volume   string       `json:"volume" yaml:"volume"`
	Snapshot string       `json:"snapshot,omitempty" yaml:"snapshot,omitempty"` // none: the live file
	Inode    uint64       `json:"inode" yaml:"inode"`
	Size     uint64       `json:"size" yaml:"size"`
	Inline   bool         `json:"inline" yaml:"inline"` // the bytes lie in the inode's record
	Extents  []extentView `json:"extents" yaml:"extents"`
}

// extentView is one run of a file's bytes.
type extentView struct {
	Offset      uint64   `json:"offset" yaml:"offset"`
	Length      uint64   `json:"length" yaml:"length"`
	Chunk       string   `json:"chunk,omitempty" yaml:"chunk,omitempty"` // none: preallocated zeros
	ChunkOffset uint64   `json:"chunk_offset" yaml:"chunk_offset"`
	OpenEnded   bool     `json:"open_ended,omitempty" yaml:"open_ended,omitempty"`
	Sealed      bool     `json:"sealed" yaml:"sealed"`
	Servers     []uint64 `json:"servers,omitempty" yaml:"servers,omitempty"`
}

func newLocate() *cobra.Command {
	var w where
	var out output
	cmd := &cobra.Command{
		Use:   "locate PATH",
		Short: "Show in which chunks, on which chunk servers, a file's bytes lie",
		Long: `Shows the extents of a file: which bytes lie in which chunk, and which chunk
servers hold it. PATH is a file on a mount of this machine, also one in a
snapshot. What was written and not yet synced has no place until it is.`,
		Example: `  penstock locate /mnt/penstock/datasets/shard-0001.tar
  penstock locate /mnt/penstock/a.jpg --output json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			at, err := onMount(args[0])
			if err != nil {
				return err
			}
			return w.with(cmd.Context(), func(s *client.Session) error {
				view := locateView{Path: args[0], Volume: fmt.Sprint(at.volume), Inode: uint64(at.ino), Extents: []extentView{}}
				v, err := s.VolumeByID(cmd.Context(), at.volume)
				if err != nil {
					return err
				}
				view.Volume = v.Name
				view.Snapshot = at.snapshot
				var off uint64
				for {
					r, err := s.DoAt(cmd.Context(), at.volume, at.generation, &meta.Open{Ino: at.ino, Off: off})
					if err != nil {
						return err
					}
					view.Size, view.Inline = r.Attr.Size, r.Attr.Flags&meta.FlagInline != 0
					for _, e := range r.Extents {
						view.Extents = append(view.Extents, viewExtent(e, r.Places))
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
		chunk := e.Chunk
		if chunk == "" {
			chunk = "-"
		}
		t.row(e.Offset, e.Length, chunk, e.ChunkOffset, state, strings.Trim(fmt.Sprint(e.Servers), "[]"))
	}
}

// mountTypes are how the kernel names our mounts in /proc/self/mountinfo.
var mountTypes = []string{"fuse.penstock", "fuseblk.penstock"}

// located is an inode, of a live volume if generation is zero.
type located struct {
	volume     meta.VolumeID
	ino        meta.Ino
	snapshot   string
	generation meta.Generation
}

// onMount finds the inode of a path on a mount, which the mount tells in attributes of
// the file. The inode number does not tell it.
func onMount(path string) (located, error) {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_INO|unix.STATX_TYPE, &st)
	if err != nil {
		return located{}, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	ours, err := isOurMount(st.Dev_major, st.Dev_minor)
	if err != nil {
		return located{}, err
	}
	if !ours {
		return located{}, fmt.Errorf("%s is not on a mount of penstock", path)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return located{}, fmt.Errorf("%s is not a regular file: it has no bytes of its own", path)
	}
	var at located
	err = at.ask(path)
	return at, err
}

// ask reads the attributes in which the mount tells what the file is.
func (at *located) ask(path string) error {
	ask := func(name string) (string, error) {
		b := make([]byte, 2*meta.MaxName)
		n, err := unix.Lgetxattr(path, name, b)
		if err != nil {
			return "", &os.PathError{Op: "getxattr", Path: path, Err: err}
		}
		return string(b[:n]), nil
	}
	inode, err := ask(fuse.XattrInode)
	if err != nil {
		return err
	}
	if _, err := fmt.Sscanf(inode, "%d:%d", &at.volume, &at.ino); err != nil {
		return fmt.Errorf("%s is in volume and inode %q: %w", path, inode, err)
	}
	generation, err := ask(fuse.XattrSnapshot)
	if errors.Is(err, unix.ENODATA) { // a live file
		return nil
	}
	if err != nil {
		return err
	}
	volume, err := ask(fuse.XattrVolume)
	if err != nil {
		return err
	}
	at.snapshot = volume[strings.LastIndexByte(volume, '@')+1:]
	if _, err := fmt.Sscan(generation, &at.generation); err != nil {
		return fmt.Errorf("%s is in generation %q: %w", path, generation, err)
	}
	return nil
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
