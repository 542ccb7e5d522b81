package demo

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// want is the expected contents of a file.
type want struct {
	size int64
	sum  [sha256.Size]byte
	// samples are checksums of the parts that training reads one at a time: a whole
	// image, or a record of a shard.
	samples []sample
}

// sample is a part of a file.
type sample struct {
	off int64
	len int
	crc uint32 // Castagnoli
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// recordBytes is the size of a record in a shard.
const recordBytes = 128 << 10

func (d *demo) bytes() (n int64) {
	for _, w := range d.files {
		n += w.size
	}
	return n
}

// each runs work for n items on several goroutines and returns the first error
// of each.
func each(ctx context.Context, workers, n int, work func(i int) error) error {
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < n && errs[w] == nil; i += workers {
				if errs[w] = ctx.Err(); errs[w] == nil {
					errs[w] = work(i)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// syncFS makes all of a directory's file system durable.
func syncFS(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.NewSyscallError("syncfs", unix.Syncfs(int(f.Fd())))
}

// ingestTree copies a source tree, file by file, and syncs once at the end.
func (d *demo) ingestTree(ctx context.Context) error {
	type item struct {
		path string
		mode fs.FileMode
	}
	var dirs, files []item
	err := filepath.WalkDir(d.cfg.Tree, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(d.cfg.Tree, path)
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		switch {
		case e.IsDir():
			dirs = append(dirs, item{filepath.Join("src", rel), 0o755})
		case e.Type().IsRegular():
			files = append(files, item{rel, info.Mode().Perm()})
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			d.files[filepath.Join("src", rel)] = want{size: int64(len(b)), sum: sha256.Sum256(b)}
		}
		return nil
	})
	if err != nil {
		return err
	}
	return d.both("ingest a source tree", float64(len(files)), "files", func(root string) error {
		for _, dir := range dirs {
			if err := os.Mkdir(filepath.Join(root, dir.path), dir.mode); err != nil {
				return err
			}
		}
		for _, f := range files {
			if err := ctx.Err(); err != nil {
				return err
			}
			b, err := os.ReadFile(filepath.Join(d.cfg.Tree, f.path))
			if err != nil {
				return err
			}
			if err := os.WriteFile(filepath.Join(root, "src", f.path), b, f.mode); err != nil {
				return err
			}
		}
		return syncFS(root)
	})
}

// noise has the incompressible bytes of which generated files are made.
var noise = sync.OnceValue(func() []byte {
	b := make([]byte, 4<<20)
	rand.NewChaCha8([32]byte{'d', 'e', 'm', 'o'}).Read(b)
	return b
})

// image makes the bytes of an image-like file: a header that differs from all other
// images, and noise. Sizes are spread around 100 KiB.
func image(i int) []byte {
	r := rand.New(rand.NewPCG(uint64(i), 1))
	size := 50<<10 + r.IntN(100<<10)
	start := r.IntN(len(noise()) - size)
	b := bytes.Clone(noise()[start : start+size])
	copy(b, fmt.Sprintf("\xff\xd8\xff\xe0\x00\x10JFIF image %08d", i))
	return b
}

func imagePath(i int) string {
	return filepath.Join("images", fmt.Sprintf("class-%02d", i%100), fmt.Sprintf("%06d.jpg", i))
}

func (d *demo) ingestImages(ctx context.Context) error {
	wants := make([]want, d.cfg.Images)
	err := each(ctx, writers, d.cfg.Images, func(i int) error {
		b := image(i)
		wants[i] = want{size: int64(len(b)), sum: sha256.Sum256(b), samples: []sample{{0, len(b), crc32.Checksum(b, castagnoli)}}}
		return nil
	})
	if err != nil {
		return err
	}
	for i, w := range wants {
		d.files[imagePath(i)] = w
	}
	return d.both("ingest images of about 100 KiB", float64(d.cfg.Images), "files", func(root string) error {
		for class := range 100 {
			if err := os.MkdirAll(filepath.Join(root, "images", fmt.Sprintf("class-%02d", class)), 0o755); err != nil {
				return err
			}
		}
		err := each(ctx, writers, d.cfg.Images, func(i int) error {
			return os.WriteFile(filepath.Join(root, imagePath(i)), image(i), 0o644)
		})
		return errors.Join(err, syncFS(root))
	})
}

func shardPath(i int) string { return fmt.Sprintf("shard-%04d.bin", i) }

// record makes record n of shard i.
func record(b []byte, i int, n int64) {
	start := rand.New(rand.NewPCG(uint64(i)<<32|uint64(n), 2)).IntN(len(noise()) - len(b))
	copy(b, noise()[start:start+len(b)])
	copy(b, fmt.Sprintf("shard %04d record %08d", i, n))
}

// writeRecords writes a file of records and syncs the file.
func writeRecords(ctx context.Context, path string, seed int, size int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	block := make([]byte, 8*recordBytes)
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		b := block[:min(int64(len(block)), size-off)]
		for at := 0; at < len(b); at += recordBytes {
			record(b[at:min(at+recordBytes, len(b))], seed, (off+int64(at))/recordBytes)
		}
		if _, err := f.Write(b); err != nil {
			return err
		}
		off += int64(len(b))
	}
	if err := f.Sync(); err != nil {
		return err
	}
	return f.Close()
}

// records lists the samples of a file of records, and the checksum of the whole file.
func records(seed int, size int64) want {
	w := want{size: size}
	whole := sha256.New()
	b := make([]byte, recordBytes)
	for off := int64(0); off < size; off += recordBytes {
		b = b[:min(recordBytes, size-off)]
		record(b, seed, off/recordBytes)
		whole.Write(b)
		w.samples = append(w.samples, sample{off, len(b), crc32.Checksum(b, castagnoli)})
	}
	whole.Sum(w.sum[:0])
	return w
}

func (d *demo) ingestShards(ctx context.Context) error {
	for i := range shards {
		d.files[shardPath(i)] = records(i, d.cfg.ShardBytes)
	}
	return d.both(fmt.Sprintf("ingest %d shards of %d MiB, fsync", shards, d.cfg.ShardBytes>>20), float64(shards*d.cfg.ShardBytes)/1e6, "MB", func(root string) error {
		for i := range shards {
			if err := writeRecords(ctx, filepath.Join(root, shardPath(i)), i, d.cfg.ShardBytes); err != nil {
				return err
			}
		}
		return syncFS(root)
	})
}

// train reads every sample of images and shards in random order, several
// readers at once, and checks each; twice, in another order.
func (d *demo) train(ctx context.Context) error {
	type at struct {
		path string
		sample
	}
	var all []at
	var total float64
	for path, w := range d.files {
		for _, s := range w.samples {
			all = append(all, at{path, s})
			total += float64(s.len)
		}
	}
	slices.SortFunc(all, func(a, b at) int { return cmp.Or(strings.Compare(a.path, b.path), cmp.Compare(a.off, b.off)) })
	for epoch := range epochs {
		order := rand.New(rand.NewPCG(uint64(epoch), 3)).Perm(len(all))
		err := d.both(fmt.Sprintf("train, epoch %d, %d readers", epoch+1, readers), total/1e6, "MB", func(root string) error {
			return each(ctx, readers, len(all), func(i int) error {
				s := all[order[i]]
				f, err := os.Open(filepath.Join(root, s.path))
				if err != nil {
					return err
				}
				defer f.Close()
				b := make([]byte, s.len)
				if _, err := f.ReadAt(b, s.off); err != nil && !errors.Is(err, io.EOF) {
					return err
				}
				if crc32.Checksum(b, castagnoli) != s.crc {
					return fmt.Errorf("%s, %d bytes at %d: not what was written", s.path, s.len, s.off)
				}
				return nil
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// checkpoint saves twice, as a job does: write beside, fsync, rename over the
// last, fsync the directory.
func (d *demo) checkpoint(ctx context.Context) error {
	size := 2 * d.cfg.ShardBytes
	const saves = 2
	d.files["model.ckpt"] = records(1000+saves-1, size)
	return d.both(fmt.Sprintf("checkpoint of %d MiB, replaced once", size>>20), saves*float64(size)/1e6, "MB", func(root string) error {
		for n := range saves {
			tmp := filepath.Join(root, "model.ckpt.tmp")
			if err := writeRecords(ctx, tmp, 1000+n, size); err != nil {
				return err
			}
			if err := os.Rename(tmp, filepath.Join(root, "model.ckpt")); err != nil {
				return err
			}
			dir, err := os.Open(root)
			if err != nil {
				return err
			}
			err = dir.Sync()
			dir.Close()
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// verify reads every file whole, and checks that no other file exists.
func (d *demo) verify(ctx context.Context) error {
	var found []string
	err := filepath.WalkDir(d.root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			var rel string
			rel, err = filepath.Rel(d.root, path)
			found = append(found, rel)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, path := range found {
		if _, ok := d.files[path]; !ok {
			return fmt.Errorf("%s is there, and nobody wrote it", path)
		}
	}
	if len(found) != len(d.files) {
		return fmt.Errorf("%d files are there, %d were written", len(found), len(d.files))
	}
	err = each(ctx, readers, len(found), func(i int) error {
		w := d.files[found[i]]
		f, err := os.Open(filepath.Join(d.root, found[i]))
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		n, err := io.Copy(h, f)
		if err != nil {
			return err
		}
		if n != w.size || [sha256.Size]byte(h.Sum(nil)) != w.sum {
			return fmt.Errorf("%s: %d bytes, %d were written, or their checksum differs", found[i], n, w.size)
		}
		return nil
	})
	if err != nil {
		return err
	}
	d.printf("verified %d files\n", len(found))
	return nil
}
