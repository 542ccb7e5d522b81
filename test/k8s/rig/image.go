package rig

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"strings"
)

// image is a container image of one layer, with files of this machine and links.
type image struct {
	Names      []string // names in the runtime: registry/path:tag
	User       string
	Entrypoint []string
	Env        []string          // beside PATH
	Files      map[string]string // path in the image: path here
	Links      map[string]string // path in the image: target
	Dirs       []string          // for anybody to write to, as /tmp is
	Tree       string            // a directory here, all of which is in the image; "": none
}

// write writes the image as an archive that runtimes load, in the format of `docker
// save`.
func (i image) write(to string) (err error) {
	layer, err := os.CreateTemp(filepath.Dir(to), "layer-")
	if err != nil {
		return err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	h := sha256.New()
	if err := i.layer(io.MultiWriter(layer, h)); err != nil {
		return err
	}
	size, err := layer.Seek(0, io.SeekCurrent)
	if err == nil {
		_, err = layer.Seek(0, io.SeekStart)
	}
	if err != nil {
		return err
	}
	sum := fmt.Sprintf("%x", h.Sum(nil))
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Env": append([]string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin"}, i.Env...), "Entrypoint": i.Entrypoint, "User": i.User},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum}},
	})
	if err != nil {
		return err
	}
	configName, layerName := fmt.Sprintf("%x.json", sha256.Sum256(config)), sum+"/layer.tar"
	manifest, err := json.Marshal([]map[string]any{{"Config": configName, "RepoTags": i.Names, "Layers": []string{layerName}}})
	if err != nil {
		return err
	}
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	w := tar.NewWriter(out)
	for _, f := range []struct {
		name string
		from io.Reader
		size int64
	}{
		{configName, strings.NewReader(string(config)), int64(len(config))},
		{layerName, layer, size},
		{"manifest.json", strings.NewReader(string(manifest)), int64(len(manifest))},
	} {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: f.size}); err != nil {
			return err
		}
		if _, err := io.Copy(w, f.from); err != nil {
			return err
		}
	}
	return w.Close()
}

// layer writes the archive of the image's files.
func (i image) layer(to io.Writer) error {
	w := tar.NewWriter(to)
	made := map[string]bool{}
	dir := func(of string) error {
		at := ""
		for _, part := range strings.Split(strings.Trim(of, "/"), "/") {
			if at = path.Join(at, part); at == "" || at == "." || made[at] {
				continue
			}
			made[at] = true
			if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: at + "/", Mode: 0o755}); err != nil {
				return err
			}
		}
		return nil
	}
	if i.Tree != "" {
		if err := addTree(w, i.Tree, made); err != nil {
			return err
		}
	}
	for in, here := range i.Files {
		if err := dir(path.Dir(in)); err != nil {
			return err
		}
		if err := addFile(w, strings.Trim(in, "/"), here, 0o755); err != nil {
			return err
		}
	}
	for in, target := range i.Links {
		if err := dir(path.Dir(in)); err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: strings.Trim(in, "/"), Linkname: target, Mode: 0o777}); err != nil {
			return err
		}
	}
	for _, d := range i.Dirs {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: strings.Trim(d, "/") + "/", Mode: 0o1777}); err != nil {
			return err
		}
	}
	return w.Close()
}

func addFile(w *tar.Writer, name, from string, mode int64) error {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: fi.Size()}); err != nil {
		return err
	}
	_, err = io.Copy(w, f)
	return err
}

// addTree adds the directories, files and links below a directory, all owned by root.
func addTree(w *tar.Writer, tree string, made map[string]bool) error {
	return filepath.WalkDir(tree, func(at string, e fs.DirEntry, err error) error {
		if err != nil || at == tree {
			return err
		}
		name, err := filepath.Rel(tree, at)
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case fi.IsDir():
			made[name] = true
			return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: int64(fi.Mode().Perm())})
		case fi.Mode().IsRegular():
			return addFile(w, name, at, int64(fi.Mode().Perm()))
		case fi.Mode()&fs.ModeSymlink != 0:
			target, err := os.Readlink(at)
			if err != nil {
				return err
			}
			return w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: target, Mode: 0o777})
		}
		return nil // devices and the like are the runtime's
	})
}

// fromDockerfile reads the last stage of a Dockerfile that copies programs into an empty
// image and sets the user and the command; built has the paths of the copied programs.
func fromDockerfile(text string, built map[string]string) (image, error) {
	i := image{Files: map[string]string{}}
	inLast := false
	for _, line := range strings.Split(text, "\n") {
		word, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if word == "FROM" {
			inLast = rest == "scratch"
			continue
		}
		if !inLast || word == "" || strings.HasPrefix(word, "#") {
			continue
		}
		switch word {
		case "COPY":
			f := strings.Fields(rest)
			if len(f) != 3 || built[f[1]] == "" {
				return i, fmt.Errorf("the Dockerfile copies what nobody built: %s", line)
			}
			i.Files[f[2]] = built[f[1]]
		case "USER":
			i.User = rest
		case "ENTRYPOINT":
			if err := json.Unmarshal([]byte(rest), &i.Entrypoint); err != nil {
				return i, fmt.Errorf("the Dockerfile's entry point: %w", err)
			}
		default:
			return i, fmt.Errorf("the Dockerfile says what this does not know: %s", line)
		}
	}
	if len(i.Files) == 0 || len(i.Entrypoint) == 0 {
		return i, fmt.Errorf("the Dockerfile's last stage is not FROM scratch with COPY and ENTRYPOINT")
	}
	return i, nil
}
