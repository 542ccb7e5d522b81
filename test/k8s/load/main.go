// Command load is the work of the tests' pods: it reads and writes files whose bytes are
// a function of their names, so that any reader can check the bytes.
//
//	load files DIR N    writes N small files, in directories of a hundred
//	load check DIR N    reads the files, and demands exactly these N files
//	load data DIR N     writes a data set of N shards
//	load images DIR N   writes N images, each as a file, and all again in archives
//	load train DATA CHECKPOINTS N WORKERS EPOCHS THINK
//	                    reads the share of worker $JOB_COMPLETION_INDEX, with
//	                    checkpoints, and waits THINK after each shard; the second epoch
//	                    begins once the file CHECKPOINTS/go exists
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("say what to do")
	}
	switch what := args[0]; {
	case what == "files" && len(args) == 3:
		return withCount(args[1], args[2], writeFiles)
	case what == "check" && len(args) == 3:
		return withCount(args[1], args[2], checkFiles)
	case what == "data" && len(args) == 3:
		return withCount(args[1], args[2], writeData)
	case what == "images" && len(args) == 3:
		return withCount(args[1], args[2], writeImages)
	case what == "train" && len(args) == 7:
		var n [3]int
		for i := range n {
			var err error
			if n[i], err = strconv.Atoi(args[3+i]); err != nil {
				return err
			}
		}
		worker, err := strconv.Atoi(os.Getenv("JOB_COMPLETION_INDEX"))
		if err != nil {
			return err
		}
		think, err := time.ParseDuration(args[6])
		if err != nil {
			return err
		}
		return train(args[1], args[2], n[0], worker, n[1], n[2], think)
	default:
		return fmt.Errorf("%q: no such work", args)
	}
}

func withCount(dir, count string, do func(string, int) error) error {
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	return do(dir, n)
}

// small is the content of a small file: 32 to 2079 bytes.
func small(n int) []byte {
	sum := sha256.Sum256([]byte(strconv.Itoa(n)))
	return bytes.Repeat(sum[:], 1+int(sum[0])/4)
}

func nameOf(n int) string { return fmt.Sprintf("%d/%d", n/100, n) }

func writeFiles(dir string, count int) error {
	for n := range count {
		name := filepath.Join(dir, nameOf(n))
		if n%100 == 0 {
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(name, small(n), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func checkFiles(dir string, count int) error {
	found := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		n, err := strconv.Atoi(e.Name())
		if err != nil || n < 0 || n >= count || path != filepath.Join(dir, nameOf(n)) {
			return fmt.Errorf("%s is none of the files", path)
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Equal(b, small(n)) {
			return fmt.Errorf("%s has other bytes", path)
		}
		found++
		return nil
	})
	if err == nil && found != count {
		err = fmt.Errorf("%d of %d files are there", found, count)
	}
	if err == nil {
		fmt.Printf("%d files are right\n", count)
	}
	return err
}
