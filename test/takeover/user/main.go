// Command user is a process that uses a mount, for pods of tests that have no other program:
//
//	user DIR STOP [LONG]
//	user slow
//
// The first form uses DIR until a file STOP exists. The command prints each round of making and
// removing a file that took longer than LONG (250ms), with the round's beginning in milliseconds
// since 1970, and the counts of operations; any error and any unexpected byte is the command's
// error. The second form waits for the end of the input, and prints the slowness since the start:
// the time of a piece of work as a multiple of its time on a quiet machine (package slow).
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"penstock.io/penstock/test/slow"
	"penstock.io/penstock/test/takeover"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "user:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 1 && args[0] == "slow" {
		m := slow.Start()
		defer m.Close()
		_, err := io.Copy(io.Discard, os.Stdin)
		fmt.Println(m.Factor())
		return err
	}
	if len(args) < 2 || len(args) > 3 {
		return errors.New("want a directory and a file")
	}
	dir, stop, long := args[0], args[1], 250*time.Millisecond
	if len(args) == 3 {
		var err error
		if long, err = time.ParseDuration(args[2]); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	in, end := io.Pipe()
	var probe sync.WaitGroup
	var err error
	probe.Go(func() {
		defer end.Close()
		name := filepath.Join(dir, "probe")
		for {
			begun := time.Now()
			if err = errors.Join(os.WriteFile(name, nil, 0o644), os.Remove(name)); err != nil {
				return
			}
			if took := time.Since(begun); took > long {
				fmt.Printf("a pause of %v at %d\n", took.Round(time.Millisecond), begun.UnixMilli())
			}
			if _, there := os.Stat(stop); there == nil {
				return
			}
			time.Sleep(5 * time.Millisecond)
		}
	})
	used := takeover.Use(dir, in, os.Stdout)
	in.Close()
	probe.Wait()
	return errors.Join(used, err)
}
