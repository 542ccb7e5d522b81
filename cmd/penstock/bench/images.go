package bench

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	images     = 10_000
	imageBytes = 1 + 3*32*32
	imageDir   = 1_000 // images of a single directory
)

// imagePause is longer than a mount may trust its cached names, as an epoch of a training loop
// is. Tests shorten the pause.
var imagePause = 5 * time.Second

// imagesGroup is a training loop over small images. The system calls for each file are
// Python's: open, fstat, ioctl TCGETS (is the file a terminal?), lseek, fstat, read, read,
// close. The first epoch is cold. In later epochs all data is cached, but the mount must ask
// for the names again.
func imagesGroup() group {
	again := func(readers int) row {
		return row{name: fmt.Sprintf("images-again-%d", readers), unit: PerSecond,
			title: fmt.Sprintf("10,000 images of 3 kB read as Python does, in random order, a later epoch, %d at a time", readers),
			before: func(s *side) error {
				_, err := s.readImages(1)
				time.Sleep(imagePause)
				return err
			}, run: func(s *side) (float64, error) { return s.readImages(readers) }}
	}
	return group{name: "images", once: true, prepare: (*side).createImages, rows: []row{
		{name: "images-first", title: "the same, the first epoch, cold, 1 reader", unit: PerSecond, cold: true,
			run: func(s *side) (float64, error) { return s.readImages(1) }},
		again(1), again(2),
	}}
}

func (s *side) imagePaths() []cpath {
	paths := make([]cpath, s.cfg.scaled(images))
	for i := range paths {
		paths[i] = newPath(filepath.Join(s.dir, "images", fmt.Sprintf("%03d", i/imageDir), fmt.Sprintf("%05d.bin", i)))
	}
	return paths
}

func (s *side) createImages() error {
	b := newBuffer(imageBytes)
	for i, p := range s.imagePaths() {
		if i%imageDir == 0 {
			if err := os.MkdirAll(filepath.Dir(p.String()), 0o755); err != nil {
				return err
			}
		}
		stamp(b, mix(s.seed, i+1), 0)
		if err := os.WriteFile(p.String(), b, 0o644); err != nil {
			return err
		}
	}
	return syncAll(s.dir)
}

func (s *side) readImages(readers int) (float64, error) {
	paths := s.imagePaths()
	order := rand.New(rand.NewPCG(s.seed, 3)).Perm(len(paths))
	buffers := make([][]byte, readers)
	for w := range buffers {
		buffers[w] = make([]byte, imageBytes+1)
	}
	err := parallel(readers, len(paths), func(w, at int) error {
		i, b := order[at], buffers[w]
		n, err := readAsPython(paths[i], b)
		if err != nil {
			return fmt.Errorf("%s: %w", paths[i], err)
		}
		if n != imageBytes {
			return fmt.Errorf("%s has %d bytes, %d were written: %w", paths[i], n, imageBytes, errMismatch)
		}
		if err := check(b[:n], mix(s.seed, i+1), 0); err != nil {
			return fmt.Errorf("%s: %w", paths[i], err)
		}
		return nil
	})
	return float64(len(paths)), err
}

// readAsPython makes the system calls of open(name, "rb").read() in CPython 3.11.
func readAsPython(p cpath, b []byte) (n int, err error) {
	fd, err := rawOpen(p, unix.O_RDONLY, 0)
	if err != nil {
		return 0, err
	}
	var st unix.Stat_t
	var terminal unix.Termios
	fstat := func() error {
		_, err := call(unix.SYS_FSTAT, uintptr(fd), uintptr(unsafe.Pointer(&st)), 0, 0)
		return err
	}
	err = fstat()
	if err == nil {
		if _, e := call(unix.SYS_IOCTL, uintptr(fd), unix.TCGETS, uintptr(unsafe.Pointer(&terminal)), 0); !errors.Is(e, unix.ENOTTY) {
			err = fmt.Errorf("a file that is perhaps a terminal: %w", e)
		}
	}
	if err == nil {
		_, err = call(unix.SYS_LSEEK, uintptr(fd), 0, unix.SEEK_CUR, 0)
	}
	if err == nil {
		err = fstat()
	}
	if err == nil {
		n, err = readFull(fd, b[:min(st.Size+1, int64(len(b)))])
	}
	return n, errors.Join(err, rawClose(fd))
}
