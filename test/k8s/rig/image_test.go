package rig

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// entries reads an archive: the headers by name, and the bytes of files.
func entries(t *testing.T, from io.Reader) (headers map[string]*tar.Header, bytes map[string][]byte) {
	t.Helper()
	headers, bytes = map[string]*tar.Header{}, map[string][]byte{}
	r := tar.NewReader(from)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return headers, bytes
		}
		if err != nil {
			t.Fatal(err)
		}
		if headers[h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		if headers[h.Name] = h; h.Typeflag == tar.TypeReg {
			if bytes[h.Name], err = io.ReadAll(r); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestImage(t *testing.T) {
	tree, to := t.TempDir(), filepath.Join(t.TempDir(), "image.tar")
	if err := errors.Join(
		os.MkdirAll(filepath.Join(tree, "usr/bin"), 0o755),
		os.WriteFile(filepath.Join(tree, "usr/bin/python3.11"), []byte("python"), 0o755),
		os.Symlink("python3.11", filepath.Join(tree, "usr/bin/python3")),
		os.WriteFile(filepath.Join(tree, "usr/note"), []byte("note"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	i := image{Names: []string{"localhost/test:1"}, Entrypoint: []string{"/bin/x"}, Env: []string{"A=b"}, Tree: tree, Dirs: []string{"/tmp"},
		Files: map[string]string{"/usr/bin/note": filepath.Join(tree, "usr/note")}, Links: map[string]string{"/bin/x": "/usr/bin/note"}}
	if err := i.write(to); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(to)
	if err != nil {
		t.Fatal(err)
	}
	_, outer := entries(t, bytes.NewReader(b))
	var manifest []struct {
		Config           string
		RepoTags, Layers []string
	}
	var config struct {
		Config struct{ Env, Entrypoint []string }
		Rootfs struct {
			DiffIDs []string `json:"diff_ids"`
		}
	}
	if err := json.Unmarshal(outer["manifest.json"], &manifest); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(outer[manifest[0].Config], &config); err != nil {
		t.Fatal(err)
	}
	layer := outer[manifest[0].Layers[0]]
	if got := fmt.Sprintf("sha256:%x", sha256.Sum256(layer)); got != config.Rootfs.DiffIDs[0] || manifest[0].RepoTags[0] != "localhost/test:1" || config.Config.Env[1] != "A=b" {
		t.Errorf("the layer is %s; manifest %+v, config %+v", got, manifest, config)
	}
	headers, files := entries(t, bytes.NewReader(layer))
	for name, want := range map[string]string{"usr/bin/python3.11": "755 python", "usr/note": "600 note", "usr/bin/note": "755 note"} {
		if h := headers[name]; h == nil || fmt.Sprintf("%o %s", h.Mode, files[name]) != want {
			t.Errorf("%s is %+v %q, not %q", name, h, files[name], want)
		}
	}
	for name, target := range map[string]string{"usr/bin/python3": "python3.11", "bin/x": "/usr/bin/note"} {
		if h := headers[name]; h == nil || h.Linkname != target {
			t.Errorf("%s is %+v", name, h)
		}
	}
	for name, mode := range map[string]int64{"usr/": 0o755, "bin/": 0o755, "tmp/": 0o1777} {
		if h := headers[name]; h == nil || h.Mode != mode {
			t.Errorf("%s is %+v", name, h)
		}
	}
	if left, err := filepath.Glob(filepath.Join(filepath.Dir(to), "*")); err != nil || len(left) != 1 {
		t.Errorf("beside the archive: %v %v", left, err)
	}
}

func TestKept(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	made := 0
	dir, err := kept("this", func(dir string) error {
		made++
		return errors.Join(os.WriteFile(filepath.Join(dir, "half"), nil, 0o644), errors.New("no more"))
	})
	if err == nil {
		t.Fatalf("%s was kept", dir)
	}
	for range 2 {
		if dir, err = kept("this", func(dir string) error {
			made++
			return os.WriteFile(filepath.Join(dir, "whole"), nil, 0o644)
		}); err != nil {
			t.Fatal(err)
		}
	}
	if made != 2 {
		t.Errorf("made %d times", made)
	}
	there, err := filepath.Glob(filepath.Join(filepath.Dir(dir), "*", "*"))
	if err != nil || len(there) != 1 || filepath.Base(there[0]) != "whole" {
		t.Errorf("in the cache: %v %v", there, err)
	}
}
