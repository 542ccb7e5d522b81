package digest

import (
	"context"
	"strings"

	"penstock.io/penstock/meta"
)

// Asked is a Source of which the metadata comes as answers to reads at a
// snapshot, and the bytes otherwise.
type Asked struct {
	Ask func(ctx context.Context, op meta.Op) (*meta.Result, error)
	// Read fills p with the bytes of a file from off.
	Read func(ctx context.Context, ino meta.Ino, p []byte, off uint64) error
}

var _ Source = Asked{}

// listPage is how many entries of a directory are asked for at a time.
const listPage = 1024

// Stat asks for attributes.
func (a Asked) Stat(ctx context.Context, ino meta.Ino) (meta.Attr, error) {
	res, err := a.Ask(ctx, &meta.GetAttr{Ino: ino})
	if err != nil {
		return meta.Attr{}, err
	}
	return res.Attr, nil
}

// List asks for a directory, page by page.
func (a Asked) List(ctx context.Context, dir meta.Ino, fn func(name string, ino meta.Ino, volume meta.VolumeID) error) error {
	for op := (&meta.ReadDir{Ino: dir, Max: listPage}); ; {
		res, err := a.Ask(ctx, op)
		if err != nil {
			return err
		}
		for _, e := range res.Entries {
			if err := fn(e.Name, e.Ino, e.Volume); err != nil {
				return err
			}
			op.Cookie = e.Cookie
		}
		if res.EOF || len(res.Entries) == 0 {
			return nil
		}
	}
}

// ReadLink asks for a target.
func (a Asked) ReadLink(ctx context.Context, ino meta.Ino) (string, error) {
	res, err := a.Ask(ctx, &meta.ReadLink{Ino: ino})
	if err != nil {
		return "", err
	}
	return string(res.Data), nil
}

// Xattrs asks for names, and then for each value.
func (a Asked) Xattrs(ctx context.Context, ino meta.Ino) ([]Xattr, error) {
	res, err := a.Ask(ctx, &meta.ListXattr{Ino: ino})
	if err != nil {
		return nil, err
	}
	var l []Xattr
	for name := range strings.SplitSeq(string(res.Data), "\x00") {
		if name == "" {
			continue
		}
		res, err := a.Ask(ctx, &meta.GetXattr{Ino: ino, Name: name})
		if err != nil {
			return nil, err
		}
		l = append(l, Xattr{name, res.Data})
	}
	return l, nil
}

// Extents asks for all extents of a file, page by page.
func (a Asked) Extents(ctx context.Context, ino meta.Ino) (extents []meta.Extent, inline []byte, err error) {
	for op := (&meta.Open{Ino: ino}); ; {
		res, err := a.Ask(ctx, op)
		if err != nil {
			return nil, nil, err
		}
		if op.Off == 0 {
			inline = res.Data
		}
		extents = append(extents, res.Extents...)
		if res.EOF || len(res.Extents) == 0 {
			return extents, inline, nil
		}
		op.Off = extents[len(extents)-1].End()
	}
}

// ReadAt reads bytes.
func (a Asked) ReadAt(ctx context.Context, ino meta.Ino, p []byte, off uint64) error {
	return a.Read(ctx, ino, p, off)
}
