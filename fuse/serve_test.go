package fuse

import (
	"errors"
	"testing"

	"penstock.io/penstock/meta"
)

func TestParseSource(t *testing.T) {
	for source, want := range map[string][3]string{
		"/":               {"", "", "/"},
		"/a/../b":         {"", "", "/b"},
		"datasets:":       {"datasets", "", "/"},
		"datasets:/img/x": {"datasets", "", "/img/x"},
		"datasets:img":    {"datasets", "", "/img"},
		"a/b":             {"", "", "/a/b"},
		"a@b":             {"", "", "/a@b"},
		"v@snap:/a@b":     {"v", "snap", "/a@b"},
		"v@2026-11-20":    {"", "", "/v@2026-11-20"},
		"v@hour.3:":       {"v", "hour.3", "/"},
	} {
		volume, snapshot, dir, err := ParseSource(source)
		if err != nil || volume != want[0] || snapshot != want[1] || dir != want[2] {
			t.Errorf("%q: %q %q %q %v", source, volume, snapshot, dir, err)
		}
	}
	for _, source := range []string{"", ":", ":/x", "a/b:/c", "v@:/", "@s:/", "v@a@b:/", "v@a/b:/"} {
		if _, _, _, err := ParseSource(source); !errors.Is(err, meta.Invalid) {
			t.Errorf("%q: %v", source, err)
		}
	}
}

func TestResolve(t *testing.T) {
	tree := newMemTree()
	sub := tree.volumes[2].add(meta.RootIno, "sub", &memInode{attr: meta.Attr{Mode: meta.TypeDir | 0o755}})
	tree.volumes[2].add(meta.RootIno, "file", &memInode{attr: meta.Attr{Mode: meta.TypeRegular | 0o644}})
	for _, c := range []struct {
		dir  string
		v    meta.VolumeID
		ino  meta.Ino
		want meta.Kind
	}{
		{"/", 1, 1, meta.KindOK},
		{"/junction", 2, 1, meta.KindOK},
		{"/junction/sub", 2, sub, meta.KindOK},
		{"/junction/file", 0, 0, meta.NotDir},
		{"/none", 0, 0, meta.NotFound},
	} {
		v, ino, err := Resolve(t.Context(), tree, 1, c.dir)
		if v != c.v || ino != c.ino || meta.KindOf(err) != c.want {
			t.Errorf("%s: %d:%d %v", c.dir, v, ino, err)
		}
	}
}
