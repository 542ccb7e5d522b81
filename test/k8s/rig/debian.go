package rig

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Torch is an image with Debian's Python and torch; python3 is in its path.
const Torch = "localhost/penstock-e2e/torch:1"

// torchPackages are the image's packages, beside their dependencies. The default libblas
// is the slow reference implementation.
var torchPackages = []string{"python3-torch", "libopenblas0-pthread"}

// LoadTorch loads the image into a node's runtime. The image is made once and kept;
// making it takes apt's package lists and a download.
func (r *Rig) LoadTorch(ctx context.Context, node string) error {
	begin := time.Now()
	archive, err := torchImage(r.say)
	if err != nil {
		return err
	}
	if err := ctr(ctx, r.Machine(node), "images", "import", archive); err != nil {
		return err
	}
	r.step(&begin, "%s has %s", node, Torch)
	return nil
}

func torchImage(say func(string, ...any)) (archive string, err error) {
	return debianImage(torchPackages, image{
		Names: []string{Torch}, Entrypoint: []string{"/usr/bin/python3"}, Dirs: []string{"/tmp"},
		// The scripts of the packages, which do not run here, would make links to this
		// libblas.
		Env: []string{"LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu/openblas-pthread:/usr/lib/aarch64-linux-gnu/openblas-pthread", "HOME=/tmp"},
	}, say)
}

// debianImage makes an image of this machine's Debian: packages and their dependencies,
// unpacked. No script of a package runs, so the results of such scripts are missing.
// debianImage returns the archive, which is kept.
func debianImage(packages []string, i image, say func(string, ...any)) (archive string, err error) {
	release, err := os.ReadFile("/etc/debian_version")
	if err != nil {
		return "", fmt.Errorf("images of Debian's packages are made on Debian: %w", err)
	}
	dir, err := kept(fmt.Sprintf("debian %s %q %q %q %v", release, packages, i.Names, i.Env, leftOut), func(dir string) error {
		begin := time.Now()
		work := filepath.Join(dir, "work")
		for _, d := range []string{"cache/archives/partial", "root"} {
			if err := os.MkdirAll(filepath.Join(work, d), 0o755); err != nil {
				return err
			}
		}
		// An empty status file makes apt believe that nothing is installed, so apt
		// fetches every dependency down to libc.
		status := filepath.Join(work, "status")
		if err := os.WriteFile(status, nil, 0o644); err != nil {
			return err
		}
		fetch := append([]string{
			"-q", "-y", "--no-install-recommends", "--download-only",
			"-o", "Dir::State::status=" + status, "-o", "Dir::Cache=" + filepath.Join(work, "cache"),
			"-o", "APT::Sandbox::User=root", "-o", "Debug::NoLocking=true", "install",
		}, packages...)
		if _, err := output("/", "apt-get", fetch...); err != nil {
			if _, err := output("/", "apt-get", "update", "-q"); err != nil {
				return err
			}
			if _, err := output("/", "apt-get", fetch...); err != nil {
				return err
			}
		}
		debs, err := filepath.Glob(filepath.Join(work, "cache/archives/*.deb"))
		if err != nil {
			return err
		}
		fetched, bytes := time.Since(begin), int64(0)
		i.Tree = filepath.Join(work, "root")
		for _, deb := range debs {
			fi, err := os.Stat(deb)
			if err != nil {
				return err
			}
			bytes += fi.Size()
			if _, err := output("/", "dpkg-deb", "-x", deb, i.Tree); err != nil {
				return err
			}
		}
		for _, d := range leftOut {
			if err := os.RemoveAll(filepath.Join(i.Tree, d)); err != nil {
				return err
			}
		}
		if err := i.write(filepath.Join(dir, "image.tar")); err != nil {
			return err
		}
		say("%d packages, %d MB, fetched in %.0f s and made an image in %.0f s", len(debs), bytes>>20, fetched.Seconds(), (time.Since(begin) - fetched).Seconds())
		return os.RemoveAll(work)
	})
	if err != nil {
		return "", fmt.Errorf("an image of %s: %w", strings.Join(packages, ", "), err)
	}
	return filepath.Join(dir, "image.tar"), nil
}

// leftOut lists the directories that no container needs.
var leftOut = []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/share/lintian"}
