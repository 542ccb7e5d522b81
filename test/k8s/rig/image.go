package rig

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"runtime"
	"strings"
)

// image is an image of one layer: files of this machine, and links.
type image struct {
	Names      []string // as the runtime keeps it: registry/path:tag
	User       string
	Entrypoint []string
	Files      map[string]string // path in the image: path here
	Links      map[string]string // path in the image: target
}

// write makes the archive of it that runtimes load: `docker save` makes the same.
func (i image) write(to string) error {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
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
	for in, here := range i.Files {
		b, err := os.ReadFile(here)
		if err != nil {
			return err
		}
		if err := dir(path.Dir(in)); err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.Trim(in, "/"), Mode: 0o755, Size: int64(len(b))}); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
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
	if err := w.Close(); err != nil {
		return err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(layer.Bytes()))
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Env": []string{"PATH=/bin:/sbin"}, "Entrypoint": i.Entrypoint, "User": i.User},
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
	var out bytes.Buffer
	o := tar.NewWriter(&out)
	for _, f := range []struct {
		name string
		b    []byte
	}{{configName, config}, {layerName, layer.Bytes()}, {"manifest.json", manifest}} {
		if err := o.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.b))}); err != nil {
			return err
		}
		if _, err := o.Write(f.b); err != nil {
			return err
		}
	}
	if err := o.Close(); err != nil {
		return err
	}
	return os.WriteFile(to, out.Bytes(), 0o644)
}

// fromDockerfile reads the last stage of a Dockerfile that copies programs into an
// empty image and says who runs which; built says where those are that it copies.
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
