package rig

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
)

// kept returns the cache's directory for a result that depends only on of. If the
// directory is missing, kept makes it, whole or not at all. An interrupted make leaves a
// directory that no later call uses.
func kept(of string, make func(dir string) error) (dir string, err error) {
	cache, err := os.UserCacheDir() // $XDG_CACHE_HOME or ~/.cache
	if err != nil {
		return "", err
	}
	base := filepath.Join(cache, "penstock-e2e")
	dir = filepath.Join(base, fmt.Sprintf("%x", sha256.Sum256([]byte(of)))[:24])
	if _, err := os.Stat(dir); err == nil {
		return dir, nil
	}
	if err := os.MkdirAll(base, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(base, "building-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	if err := make(tmp); err != nil {
		return "", err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return "", err
	}
	return dir, os.Rename(tmp, dir)
}
