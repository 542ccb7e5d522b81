package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Images have the format of CIFAR-10: a byte for the class, then the red, the green and
// the blue values of 32 * 32 pixels. Here an image has stripes, which depend on the
// class, under noise, so that a network has something to learn.
const (
	imageSide   = 32
	imageSize   = 1 + 3*imageSide*imageSide
	classes     = 10
	shardImages = 1000 // of a shard, and of a directory of files
)

// imageOf makes the image of a number.
func imageOf(n int) []byte {
	b := make([]byte, imageSize)
	class := n % classes
	b[0] = byte(class)
	noise := rand.New(rand.NewPCG(uint64(n), classes))
	for i := range b[1:] {
		x, y := i%imageSide, i/imageSide%imageSide
		v := byte(noise.Uint32() % 160)
		if (x*(1+class%5)+y*(1+class/5))%8 < 4 {
			v += 95
		}
		b[1+i] = v
	}
	return b
}

// writeImages writes count images, each as a file, and all again in archives:
//
//	files/NNN/NNNNN.bin
//	shards/shard-NNNN.tar
func writeImages(dir string, count int) error {
	if count <= 0 || count%shardImages != 0 {
		return fmt.Errorf("%d images: say a multiple of %d", count, shardImages)
	}
	if err := os.MkdirAll(filepath.Join(dir, "shards"), 0o755); err != nil {
		return err
	}
	for s := range count / shardImages {
		if err := writeImageShard(dir, s); err != nil {
			return err
		}
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(unix.Syncfs(int(d.Fd())), d.Close())
}

func writeImageShard(dir string, s int) error {
	files := filepath.Join(dir, "files", fmt.Sprintf("%03d", s))
	if err := os.MkdirAll(files, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, "shards", fmt.Sprintf("shard-%04d.tar", s)))
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	for n := s * shardImages; n < (s+1)*shardImages; n++ {
		name, b := fmt.Sprintf("%05d.bin", n), imageOf(n)
		if err := os.WriteFile(filepath.Join(files, name), b, 0o644); err != nil {
			return err
		}
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: imageSize}); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return errors.Join(w.Close(), f.Sync())
}
